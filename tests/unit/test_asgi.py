"""Guard: every way to give the token, and what it answers without; body limits; the browser's cookie."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, MutableMapping
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request
from pydantic import BaseModel

from sync.asgi import COOKIE, Guard
from sync.schema.calls import ErrorResponse

TOKEN = "a;b=c&d+0123456789abc"
LIMIT = 1_000

pytestmark = pytest.mark.unit


class Body(BaseModel):
    text: str


def guarded() -> Guard:
    app = FastAPI()

    @app.get("/health")
    @app.get("/v1/status")
    @app.get("/")
    async def seen(request: Request) -> dict[str, str]:
        return {"path": request.url.path, "query": request.url.query}

    @app.post("/v1/parsed")
    async def parsed(body: Body) -> int:
        return len(body.text)

    @app.post("/v1/read")
    async def read(request: Request) -> int:
        return len(await request.body())

    @app.get("/v1/broken")
    async def broken() -> None:
        raise ValueError("a fault of the app")

    return Guard(app, token=TOKEN, max_body=LIMIT)


def ask(guard: Guard, method: str, path: str, **kwargs: Any) -> httpx.Response:
    async def once() -> httpx.Response:
        transport = httpx.ASGITransport(guard, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://space") as client:
            return await client.request(method, path, **kwargs)

    return asyncio.run(once())


def code(answer: httpx.Response) -> str:
    return ErrorResponse.model_validate_json(answer.content).error.code


def quoted(text: str) -> str:
    return str(httpx.QueryParams({"k": text}))[2:]


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": f"Bearer {TOKEN}"},
        {"authorization": f"bearer  {TOKEN} "},
        {"x-api-key": TOKEN},
        {"X-Deltawire-Key": TOKEN},
        {"authorization": "Bearer the-proxy-consumed-this", "x-deltawire-key": TOKEN},
        {"cookie": f"other=1; {COOKIE}={quoted(TOKEN)}"},
        {"cookie": f'broken"; a{{}}b ; {COOKIE}={quoted(TOKEN)}; x=y'},
    ],
)
def test_token_is_accepted_in_every_header(headers: dict[str, str]) -> None:
    guard = guarded()
    assert ask(guard, "GET", "/v1/status", headers=headers).status_code == 200
    assert guard.refused == 0


def test_token_is_accepted_as_first_path_part_which_the_app_does_not_see() -> None:
    guard = Guard(FastAPI(), token="t" * 16, max_body=LIMIT)
    assert ask(guard, "GET", f"/s/{'t' * 16}/v1/nothing").status_code == 404
    assert ask(guard, "GET", f"/s/{'u' * 16}/v1/nothing").status_code == 401

    seen: list[MutableMapping[str, Any]] = []

    async def app(scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        seen.append(scope)
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    assert ask(Guard(app, token=TOKEN, max_body=LIMIT), "GET", f"/s/{TOKEN}/v1/status?a=1").status_code == 204
    assert seen[0]["path"] == "/v1/status"
    assert seen[0]["root_path"] == f"/s/{TOKEN}"


@pytest.mark.parametrize(
    ("path", "headers"),
    [
        ("/v1/status", {}),
        ("/", {}),
        ("/v1/status", {"authorization": "Bearer wrong"}),
        ("/v1/status", {"authorization": f"Basic {TOKEN}"}),
        ("/v1/status", {"authorization": "Bearer "}),
        ("/v1/status", {"x-api-key": TOKEN + "x"}),
        ("/v1/status", {"x-api-key": "\u00e4".encode("latin-1")}),
        ("/v1/status", {"cookie": f"{COOKIE}=wrong"}),
        ("/v1/status?key=wrong", {}),
        ("/s/wrong/v1/status", {}),
        ("/s/", {}),
        ("//health", {}),
    ],
)
def test_wrong_or_missing_token_is_401_and_counted(path: str, headers: dict[str, Any]) -> None:
    guard = guarded()
    answer = ask(guard, "GET", path, headers=headers)
    assert answer.status_code == 401
    assert code(answer) == "unauthorized"
    assert answer.headers["www-authenticate"] == "Bearer"
    assert "set-cookie" not in answer.headers
    assert guard.refused == 1


def test_health_is_public_and_never_hands_out_the_token() -> None:
    guard = guarded()
    for path in ("/health", "/health?key=wrong", "/s/wrong/health?key=x"):
        answer = ask(guard, "GET", path)
        assert answer.status_code == 200
        assert "set-cookie" not in answer.headers
    assert guard.refused == 0


@pytest.mark.parametrize("form", ["query", "header", "path", "cookie"])
def test_the_key_of_a_session_opens_its_paths_and_never_yields_the_token(form: str) -> None:
    session = "one.session-key"
    guard = guarded()
    guard._sessions = {session: "one"}.get
    guard._keyed = lambda path: path == "/"

    def answer(path: str) -> httpx.Response:
        at = f"/s/{session}{path}" if form == "path" else path
        headers = {"header": {"x-api-key": session}, "cookie": {"cookie": f"{COOKIE}={session}"}}.get(form, {})
        return ask(guard, "GET", at, headers=headers, params={"key": session} if form == "query" else {})

    for path, status in (("/", 200), ("/v1/status", 403)):
        found = answer(path)
        assert found.status_code == status
        assert "set-cookie" not in found.headers
        assert TOKEN not in found.text
    assert guard.refused == 1


def test_cookie_flow() -> None:
    guard = guarded()
    first = ask(guard, "GET", "/", params={"rollout": "g-1", "key": TOKEN})
    assert first.status_code == 303
    assert first.headers["location"] == "/?rollout=g-1"
    cookie = first.headers["set-cookie"]
    assert {"Path=/", "HttpOnly", "SameSite=Lax"} <= {part.strip() for part in cookie.split(";")}
    second = ask(guard, "GET", first.headers["location"], headers={"cookie": cookie.split(";")[0]})
    assert second.status_code == 200
    assert second.json() == {"path": "/", "query": "rollout=g-1"}
    assert ask(guard, "GET", "/", params={"key": TOKEN}).headers["location"] == "/"


@pytest.mark.parametrize(
    ("path", "target"),
    [
        ("//evil.example/page", "/evil.example/page"),
        ("/\\evil.example", "/evil.example"),
        ("/\r\nset-cookie: a=b", "/%0D%0Aset-cookie:%20a=b"),
        ("/café/€", "/caf%C3%A9/%E2%82%AC"),
        ("/a?b#c%41", "/a%3Fb%23c%2541"),
    ],
)
def test_the_browser_is_sent_nowhere_else(path: str, target: str) -> None:
    sent: list[MutableMapping[str, Any]] = []

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    async def receive() -> MutableMapping[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    query = str(httpx.QueryParams({"key": TOKEN})).encode()
    scope = {"type": "http", "method": "GET", "path": path, "headers": [], "query_string": query}
    asyncio.run(guarded()(scope, receive, send))
    assert sent[0]["status"] == 303
    assert dict(sent[0]["headers"])[b"location"] == target.encode()


def test_only_a_page_request_is_redirected() -> None:
    answer = ask(guarded(), "POST", "/v1/read", params={"key": TOKEN}, content=b"abc")
    assert answer.status_code == 200
    assert answer.json() == 3


async def _chunks(sizes: list[int]) -> AsyncIterator[bytes]:
    for size in sizes:
        yield b"x" * size


@pytest.mark.parametrize("path", ["/v1/read", "/v1/parsed"])
@pytest.mark.parametrize("chunked", [False, True])
def test_body_above_the_limit_is_413_with_and_without_a_content_length(path: str, *, chunked: bool) -> None:
    guard = guarded()
    headers = {"x-api-key": TOKEN, "content-type": "application/json"}
    content = _chunks([600, 600]) if chunked else b"x" * (LIMIT + 1)
    answer = ask(guard, "POST", path, headers=headers, content=content)
    assert answer.status_code == 413
    assert code(answer) == "body_too_large"
    assert str(LIMIT) in answer.text
    assert guard.refused == 1


@pytest.mark.parametrize("content", [b"x" * LIMIT, [400, 600]])
def test_body_at_the_limit_passes(content: bytes | list[int]) -> None:
    body = content if isinstance(content, bytes) else _chunks(content)
    answer = ask(guarded(), "POST", "/v1/read", headers={"x-api-key": TOKEN}, content=body)
    assert answer.status_code == 200
    assert answer.json() == LIMIT


def test_bad_content_length_is_400_and_a_fault_of_the_app_stays_its_own() -> None:
    bad = ask(guarded(), "POST", "/v1/read", headers={"x-api-key": TOKEN, "content-length": "many"}, content=b"a")
    assert bad.status_code == 400
    assert code(bad) == "invalid_request"
    assert ask(guarded(), "GET", "/v1/broken", headers={"x-api-key": TOKEN}).status_code == 500


@pytest.mark.parametrize("key", ["", TOKEN])
def test_websocket_without_token_is_closed_before_it_is_accepted(key: str) -> None:
    reached: list[str] = []
    sent: list[MutableMapping[str, Any]] = []

    async def app(scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        reached.append(scope["type"])

    async def receive() -> MutableMapping[str, Any]:
        return {"type": "websocket.connect"}

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    headers = [(b"x-deltawire-key", key.encode())] if key else []
    scope = {"type": "websocket", "path": "/ws", "headers": headers, "query_string": b""}
    asyncio.run(Guard(app, token=TOKEN, max_body=LIMIT)(scope, receive, send))
    if key:
        assert reached == ["websocket"]
        assert sent == []
    else:
        assert reached == []
        assert [(m["type"], m["code"]) for m in sent] == [("websocket.close", 4401)]


def test_websocket_is_refused_with_the_json_of_any_refusal_where_the_server_can() -> None:
    sent: list[MutableMapping[str, Any]] = []

    async def app(scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        raise AssertionError("reached without a token")

    async def receive() -> MutableMapping[str, Any]:
        return {"type": "websocket.connect"}

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    scope = {"type": "websocket", "path": "/ws", "headers": [(b"x-api-key", b"wrong")], "query_string": b""}
    guard = Guard(app, token=TOKEN, max_body=LIMIT)
    asyncio.run(guard({**scope, "extensions": {"websocket.http.response": {}}}, receive, send))
    start, body = sent
    assert (start["type"], start["status"]) == ("websocket.http.response.start", 401)
    assert (b"www-authenticate", b"Bearer") in start["headers"]
    assert ErrorResponse.model_validate_json(body["body"]).error.code == "unauthorized"
    assert guard.refused == 1


def test_websocket_has_no_body_to_bound() -> None:
    seen: list[Any] = []

    async def app(scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        seen.extend((scope["path"], receive, send))

    async def none(*_: Any) -> Any:
        raise AssertionError

    headers = [(b"content-length", str(LIMIT + 1).encode())]
    scope = {"type": "websocket", "path": f"/s/{TOKEN}/ws", "headers": headers, "query_string": b""}
    asyncio.run(Guard(app, token=TOKEN, max_body=LIMIT)(scope, none, none))
    assert seen == ["/ws", none, none]  # nothing between the app and its frames


def test_other_scopes_pass() -> None:
    reached: list[str] = []

    async def app(scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        reached.append(scope["type"])

    async def nothing(*_: Any) -> Any:
        return None

    asyncio.run(Guard(app, token=TOKEN, max_body=LIMIT)({"type": "lifespan"}, nothing, nothing))
    assert reached == ["lifespan"]
