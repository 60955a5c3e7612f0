"""A served app under connections that say nothing, say it slowly, or never end their headers."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack

import httpx
import pytest
import uvicorn
from fastapi import FastAPI, Request

from sync.asgi import Guard
from sync.connections import bounded
from sync.serving import bind, url_of

pytestmark = pytest.mark.integration
TOKEN = "0123456789abcdef"
HEADERS = {"authorization": f"Bearer {TOKEN}"}
MOST = 8


@pytest.fixture
def url() -> Iterator[str]:
    app = FastAPI()

    @app.post("/size")
    async def size(request: Request) -> int:
        return len(await request.body())

    guard = Guard(app, token=TOKEN, max_body=1 << 20)
    with bind("127.0.0.1", 0) as listener:
        server = uvicorn.Server(uvicorn.Config(guard, http=bounded(MOST, 1.0), log_level="critical", ws="none"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield url_of(listener)
        finally:
            server.should_exit = True
            thread.join(20)


def connect(url: str) -> socket.socket:
    host, port = url.removeprefix("http://").split(":")
    found = socket.create_connection((host, int(port)), timeout=20)
    found.settimeout(20)
    return found


def ended(connection: socket.socket) -> bool:
    """True when the other side closes without a word; waits for it."""
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


def size(url: str, body: bytes = b"abc") -> int:
    answer = httpx.post(f"{url}/size", content=body, headers=HEADERS, timeout=20)
    assert answer.status_code == 200
    return int(answer.text)


def test_more_idle_connections_than_allowed_shut_nobody_out(url: str) -> None:
    with ExitStack() as stack:
        idle = [stack.enter_context(connect(url)) for _ in range(5 * MOST)]
        assert size(url) == 3
        assert all(map(ended, idle))
    assert size(url) == 3


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"POST /size HTTP/1.1\r\nHost: x\r\n",
        b"POST /size HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer "
        + TOKEN.encode()
        + b"\r\nContent-Length: 9\r\n\r\nabc",
    ],
)
def test_a_request_that_does_not_arrive_is_cut_off(url: str, said: bytes) -> None:
    with connect(url) as slow:
        slow.sendall(said)
        assert ended(slow)


def test_a_kept_connection_that_stops_in_its_next_request_is_cut_off(url: str) -> None:
    with connect(url) as slow:
        slow.sendall(b"GET /nothing HTTP/1.1\r\nHost: x\r\n\r\n")
        assert slow.recv(65_536).startswith(b"HTTP/1.1 401")
        slow.sendall(b"GET /")
        assert ended(slow)


@pytest.mark.parametrize("before", [b"", b"POST /x HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\n"])
def test_headers_without_end_are_cut_off(url: str, before: bytes) -> None:
    with connect(url) as endless:
        if before:
            endless.sendall(before)
            assert endless.recv(65_536).startswith(b"HTTP/1.1 401"), "answered before its body came"
            endless.sendall(b"abc")
        endless.sendall(b"GET / HTTP/1.1\r\nX: ")
        with pytest.raises(ConnectionError):  # noqa: PT012 - which send notices it is the system's affair
            for _ in range(1_000):
                endless.sendall(b"y" * 65_536)


def test_large_bodies_and_many_requests_on_one_connection_pass(url: str) -> None:
    with httpx.Client(base_url=url, headers=HEADERS, timeout=20) as client:
        for length in (0, 1, 1 << 20, 70_000, 3):
            assert client.post("/size", content=b"x" * length).text == str(length)
        assert client.post("/size", content=b"x" * ((1 << 20) + 1)).status_code == 413
        assert client.post("/size", content=b"x").text == "1"
