"""The store of the local Hub under the real hf_xet: what it uploads and downloads, by which calls; what is refused."""

from __future__ import annotations

import hashlib
import json
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Self
from urllib.parse import parse_qs, urlencode, urlsplit

import httpx
import numpy as np
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount
from starlette.types import Message, Receive, Scope, Send
from support.devhub import ROOT, client_env

from sync.devhub.responses import HubError, base_url, error_response
from sync.devhub.xet import formats, routes
from sync.devhub.xet.cas import Cas
from sync.devhub.xet.crc64 import crc64nvme
from sync.devhub.xet.formats import EMPTY_FILE, HEADER, hash_bytes, hash_hex
from sync.serving import bind, url_of

pytestmark = pytest.mark.integration

READ, WRITE = {"Authorization": "Bearer reader"}, {"Authorization": "Bearer writer"}
UNKNOWN = "ab" * 32

UPLOAD = """
import json, sys, time
from hf_xet import XetSession
url, *paths = sys.argv[1:]
later = int(time.time()) + 3600
with XetSession().new_upload_commit(endpoint=url, token="writer", token_expiry_unix_secs=later) as commit:
    handles = [commit.start_upload_file(path) for path in paths]
infos = [handle.result().xet_info for handle in handles]
print(json.dumps([[info.hash, info.file_size, info.sha256] for info in infos]))
"""

DOWNLOAD = """
import json, sys, time
from hf_xet import XetFileInfo, XetSession
url, wanted = sys.argv[1], json.loads(sys.argv[2])
later = int(time.time()) + 3600
with XetSession().new_file_download_group(endpoint=url, token="reader", token_expiry_unix_secs=later) as group:
    for name, size, path in wanted:
        group.start_download_file(XetFileInfo(name, size), path)
print("null")
"""

RANGES = """
import hashlib, json, sys, time
from hf_xet import XetFileInfo, XetSession
url, name, size, ranges = sys.argv[1], sys.argv[2], int(sys.argv[3]), json.loads(sys.argv[4])
later = int(time.time()) + 3600
group = XetSession().new_download_stream_group(endpoint=url, token="reader", token_expiry_unix_secs=later)
digests = []
for start, end in ranges:
    data = b"".join(bytes(piece) for piece in group.download_stream(XetFileInfo(name, size), start=start, end=end))
    digests.append([len(data), hashlib.sha256(data).hexdigest()])
group.finish()
print(json.dumps(digests))
"""


class Call(NamedTuple):
    method: str
    path: str
    query: str
    ranges: str
    status: int
    received: int


class Server:
    """The routes of a store behind uvicorn in a thread, and a log of what was called."""

    def __init__(self, folder: Path, *, grants: bool = True) -> None:
        self.folder = folder
        self.grants = grants
        self.calls: list[Call] = []

    def __enter__(self) -> Self:
        self.cas = Cas(self.folder)
        contents = routes.cas_routes(self.cas, allowed, base_url, self.grants)
        self._app = Starlette(routes=[Mount("/xet", routes=contents)], exception_handlers={HubError: answer_error})
        self._listener = bind("127.0.0.1", 0)
        config = uvicorn.Config(
            self._logged, interface="asgi3", log_level="critical", ws="none", timeout_graceful_shutdown=5
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._listener]})
        self._thread.start()
        self.url = url_of(self._listener) + "/xet"
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join(30)
        assert not self._thread.is_alive()
        self._listener.close()
        self.cas.close()
        assert [call for call in self.calls if call.status >= 500] == []

    async def _logged(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        received = 0

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            return message

        async def noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                ranges = dict(scope["headers"]).get(b"range", b"").decode()
                query = scope["query_string"].decode()
                call = Call(scope["method"], scope["path"], query, ranges, message["status"], received)
                self.calls.append(call)
            await send(message)

        await self._app(scope, counted, noted)

    def count(self, method: str, part: str) -> int:
        return len(self.matching(method, part))

    def matching(self, method: str, part: str) -> list[Call]:
        return [call for call in self.calls if call.method == method and part in call.path]


def allowed(token: str, write: bool) -> bool:
    return token == "writer" or (token == "reader" and not write)


def answer_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HubError)
    return error_response(error)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with Server(tmp_path / "xet") as running:
        yield running


@pytest.fixture
def http() -> Iterator[httpx.Client]:
    with httpx.Client(timeout=60) as client:
        yield client


class Client:
    """Processes with hf_xet that share one fresh cache, or each their own."""

    def __init__(self, home: Path, **env: str) -> None:
        self._home = home
        self._env = env

    def upload(self, server: Server, *paths: Path) -> list[tuple[str, int, str]]:
        return [tuple(found) for found in self.run(UPLOAD, server.url, *map(str, paths))]

    def download(self, server: Server, files: list[tuple[str, int]], folder: Path) -> list[Path]:
        folder.mkdir()
        paths = [folder / str(n) for n in range(len(files))]
        wanted = [(*file, str(path)) for file, path in zip(files, paths, strict=True)]
        self.run(DOWNLOAD, server.url, json.dumps(wanted))
        return paths

    def run(self, code: str, *args: str) -> Any:
        env = client_env(self._home, "http://127.0.0.1:9") | self._env
        done = subprocess.run([sys.executable, "-c", code, *args], env=env, capture_output=True, timeout=120)
        assert done.returncode == 0, done.stderr.decode()[-3000:]
        return json.loads(done.stdout)


def bf16_like(values: int) -> bytes:
    """Bits that look like a layer of weights in bfloat16."""
    floats = np.random.default_rng(3).standard_normal(values).astype(np.float32)
    return (floats.view(np.uint32) >> 16).astype(np.uint16).tobytes()


def samples(folder: Path) -> dict[str, Path]:
    source = random.Random(11)
    contents = {
        "empty": b"",
        "byte": b"x",
        "small": source.randbytes(1024),
        "random": source.randbytes(3 << 20),
        "compressible": b"".join(b"%08d, the same words again\n" % n for n in range(100_000)),
        "weights": bf16_like(1_500_000),
    }
    folder.mkdir()
    for name, data in contents.items():
        (folder / name).write_bytes(data)
    return {name: folder / name for name in contents}


def schemes(cas: Cas) -> set[int]:
    """The compression schemes of all chunks in the store."""
    found = set()
    for path in cas.xorb_path(bytes(32)).parent.parent.glob("*/*"):
        data, layout = path.read_bytes(), cas.layout(hash_bytes(path.name))
        found |= {data[int(at) + 4] for at in layout.packed[:-1]}
    return found


MODES = {
    "grants": (True, {}),
    "no grants": (False, {}),
    "direct": (True, {"HF_XET_CLIENT_LEGACY_DIRECT_XORB_UPLOAD": "1"}),
    "first versions": (
        True,
        {"HF_XET_CLIENT_RECONSTRUCTION_API_VERSION": "1", "HF_XET_CLIENT_SHARD_API_VERSION": "1"},
    ),
}


@pytest.mark.parametrize("mode", MODES)
def test_all_kinds_of_content_there_and_back(tmp_path: Path, mode: str) -> None:
    grants, env = MODES[mode]
    paths = samples(tmp_path / "in")
    contents = {name: path.read_bytes() for name, path in paths.items()}
    with Server(tmp_path / "xet", grants=grants) as server:
        infos = Client(tmp_path / "up", **env).upload(server, *paths.values())
        for (name, size, sha256), data in zip(infos, contents.values(), strict=True):
            digest = hashlib.sha256(data).hexdigest()
            assert (size, sha256) == (len(data), digest if data else EMPTY_FILE)  # hf_xet hashes no empty file
            assert (server.cas.size(name), server.cas.sha256(name)) == (size, digest)
            assert server.cas.by_sha256(digest) == name
            assert server.cas.by_sha256(sha256) == name
            assert b"".join(server.cas.read(name)) == data
        files = [(name, size) for name, size, _ in infos]
        loaded = Client(tmp_path / "down", **env).download(server, files, tmp_path / "out")
        assert [path.read_bytes() for path in loaded] == list(contents.values())
        assert infos[0][0] == EMPTY_FILE
        assert schemes(server.cas) == {0, 1, 2}
        check_calls(server, mode)


def check_calls(server: Server, mode: str) -> None:
    """The client took the path that this mode is about."""
    by_grant = mode in ("grants", "first versions")
    assert (server.count("PUT", "/uploads/") > 0) == by_grant
    assert (server.count("POST", "/v1/xorbs/") > 0) != by_grant
    assert (server.count("POST", "/xorb-grants/") > 0) == (mode != "direct")
    assert all(call.status == 200 for call in server.matching("PUT", "/uploads/"))
    assert all(parse_qs(call.query)["crc64nvme"] for call in server.matching("PUT", "/uploads/"))
    old, new = ("/v1/", "/v2/") if mode == "first versions" else ("/v2/", "/v1/")
    for route in ("shards", "reconstructions/"):
        assert server.count("POST" if route == "shards" else "GET", old + route) > 0
        assert server.count("POST" if route == "shards" else "GET", new + route) == 0
    assert [call for call in server.calls if call.status >= 400 and "chunks" not in call.path] == (
        server.matching("POST", "/xorb-grants/") if mode == "no grants" else []
    )


def test_a_fresh_machine_sends_nothing_twice(tmp_path: Path, server: Server) -> None:
    paths = list(samples(tmp_path / "in").values())
    first = Client(tmp_path / "one").upload(server, *paths)
    sent = sum(call.received for call in server.calls)
    assert sent > 3 << 20
    server.calls.clear()
    assert Client(tmp_path / "two").upload(server, *paths) == first
    assert sum(call.received for call in server.calls) < 100_000
    assert server.count("PUT", "/uploads/") == 0


def test_ranges_of_a_file_made_of_two_uploads(tmp_path: Path, server: Server) -> None:
    source = random.Random(5)
    old = source.randbytes(12 << 20)
    pieces = [old[at : at + (2 << 20)] + source.randbytes(300_000) for at in range(0, len(old), 3 << 20)]
    new = b"".join(pieces)
    (tmp_path / "old").write_bytes(old)
    (tmp_path / "new").write_bytes(new)
    client = Client(tmp_path / "one")
    client.upload(server, tmp_path / "old")
    ((name, size, _),) = client.upload(server, tmp_path / "new")
    assert len({term.xorb for term in server.cas.plan(name, 0, size).terms}) > 1
    server.calls.clear()
    multi = Client(tmp_path / "two", HF_XET_CLIENT_ENABLE_MULTIRANGE_FETCHING="1")
    (path,) = multi.download(server, [(name, size)], tmp_path / "out")
    assert path.read_bytes() == new
    assert [call for call in server.matching("GET", "/xorbs/") if "," in call.ranges and call.status == 206]
    ranges = [(0, 1), (size - 1, size), (0, size), (1_234_567, 5_678_901), (2 << 20, (2 << 20) + 1)]
    ranges += [tuple(sorted(source.sample(range(size), 2))) for _ in range(8)]  # type: ignore[misc]
    found = Client(tmp_path / "three").run(RANGES, server.url, name, str(size), json.dumps(ranges))
    assert found == [[end - start, hashlib.sha256(new[start:end]).hexdigest()] for start, end in ranges]
    assert all(b"".join(server.cas.read(name, start, end)) == new[start:end] for start, end in ranges)


def test_several_machines_send_the_same_at_once(tmp_path: Path, server: Server) -> None:
    (tmp_path / "f").write_bytes(random.Random(8).randbytes(6 << 20))
    env = [client_env(tmp_path / str(n), "http://127.0.0.1:9") for n in range(3)]
    command = [sys.executable, "-c", UPLOAD, server.url, str(tmp_path / "f")]
    running = [subprocess.Popen(command, env=e, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for e in env]
    outputs = [process.communicate(timeout=120) for process in running]
    assert [process.returncode for process in running] == [0, 0, 0], outputs
    ((name, _, _),) = json.loads(outputs[0][0])
    assert b"".join(server.cas.read(name)) == (tmp_path / "f").read_bytes()
    assert list(server.cas.tmp.iterdir()) == []


def test_everything_is_there_after_a_restart(tmp_path: Path) -> None:
    paths = samples(tmp_path / "in")
    with Server(tmp_path / "xet") as server:
        infos = Client(tmp_path / "one").upload(server, *paths.values())
    with Server(tmp_path / "xet") as server:
        files = [(name, size) for name, size, _ in infos]
        loaded = Client(tmp_path / "two").download(server, files, tmp_path / "out")
        assert [path.read_bytes() for path in loaded] == [path.read_bytes() for path in paths.values()]
        assert Client(tmp_path / "three").upload(server, *paths.values()) == infos
        assert server.count("PUT", "/uploads/") == 0


ENDLESS = """
import os, struct, sys
from pathlib import Path
from sync.devhub.xet import shards
from sync.devhub.xet.cas import Cas
from sync.devhub.xet.formats import hash_hex
cas, n = Cas(Path(sys.argv[1])), 0
bookend = b"\\xff" * 32 + bytes(16)
head = shards.write_shard([shards.ShardXorb(bytes(32), 0, shards.np.zeros(0, shards.CHUNK))], 0, 0)[:48]
while True:
    n += 1
    data = os.urandom(50_000)
    descriptor, path = cas.new_file()
    size = len(data).to_bytes(3, "little")
    os.write(descriptor, b"\\0" + size + b"\\0" + size + data)
    name = n.to_bytes(32, "little")
    cas.add_xorb(name, descriptor, path)
    os.close(descriptor)
    path = cas.tmp / "shard"
    file = name + struct.pack("<IIQ", 0, 1, 0) + name + struct.pack("<4I", 0, len(data), 0, 1)
    path.write_bytes(head + file + bookend + bookend)
    cas.add_shard(path)
    print(hash_hex(name), data[:20].hex(), flush=True)
"""


@pytest.mark.parametrize("after", [1, 2, 7, 20, 45])
def test_killed_at_any_point_what_was_accepted_stays(tmp_path: Path, after: int) -> None:
    command = [sys.executable, "-c", ENDLESS, str(tmp_path / "xet")]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        lines = [child.stdout.readline() for _ in range(after)]
        child.send_signal(signal.SIGKILL)
        lines += child.stdout.readlines()
    cas = Cas(tmp_path / "xet")
    try:
        accepted = [line.split() for line in lines if line.endswith("\n")]
        assert len(accepted) >= after
        for name, beginning in accepted:
            data = b"".join(cas.read(name))
            assert (len(data), data[:20].hex()) == (50_000, beginning)
        assert list(cas.tmp.iterdir()) == []
    finally:
        cas.close()


class TestRefusals:
    def test_tokens(self, server: Server, http: httpx.Client) -> None:
        wants_read = [f"/v1/reconstructions/{UNKNOWN}", f"/v2/reconstructions/{UNKNOWN}"]
        wants_write = [
            f"/v1/xorb-grants/default/{UNKNOWN}", f"/v1/xorb-commits/default/{UNKNOWN}/grant/1",
            f"/v1/xorbs/default/{UNKNOWN}", "/v1/shards", "/v2/shards",
        ]  # fmt: skip
        for path in wants_read:
            assert http.get(server.url + path).status_code == 401
            assert http.get(server.url + path, headers=READ).status_code == 404
        for path in wants_write:
            for headers in ({}, {"Authorization": "Bearer other"}, {"Authorization": "Basic writer"}):
                assert http.post(server.url + path, headers=headers, content=b"body").status_code == 401
            assert http.post(server.url + path, headers=READ, content=b"body").status_code == 403
            assert http.post(server.url + path, headers=WRITE, content=b"body").status_code in (400, 404)
        assert http.get(f"{server.url}/v1/chunks/default/{UNKNOWN}").status_code == 401
        assert http.get(f"{server.url}/v1/chunks/default/{UNKNOWN}", headers=WRITE).status_code == 404
        assert list(server.cas.tmp.iterdir()) == []

    def test_hashes_that_are_none(self, server: Server, http: httpx.Client) -> None:
        for name in ("short", "g" * 64, "..%2F..%2Fetc", "0" * 65):
            for path in ("/v1/reconstructions/", "/v1/chunks/default/", "/xorbs/"):
                assert http.get(f"{server.url}{path}{name}", headers=WRITE).status_code in (400, 404)
            assert http.post(f"{server.url}/v1/xorbs/default/{name}", headers=WRITE).status_code in (400, 404)

    def test_shards_that_name_unknown_xorbs(self, server: Server, http: httpx.Client) -> None:
        xorb = bytes(range(32))
        file = bytes(32) + (0).to_bytes(4, "little") + (1).to_bytes(4, "little") + bytes(8)
        file += xorb + b"".join(n.to_bytes(4, "little") for n in (0, 5, 0, 1))
        bookend = b"\xff" * 32 + bytes(16)
        for path in ("/v1/shards", "/v2/shards"):
            answer = http.post(server.url + path, headers=WRITE, content=self.head() + file + bookend + bookend)
            assert answer.status_code == 400
            assert f"no xorb {hash_hex(xorb)}" in answer.headers["x-error-message"]
            for body in (b"", b"no shard", self.head(), self.head() + file, self.head() + bookend):
                assert http.post(server.url + path, headers=WRITE, content=body).status_code == 400

    @staticmethod
    def head() -> bytes:
        from sync.devhub.xet import shards

        return shards.write_shard([shards.ShardXorb(bytes(32), 0, np.zeros(0, shards.CHUNK))], 0, 0)[:48]

    def test_bodies_that_are_no_xorb(self, server: Server, http: httpx.Client) -> None:
        for body in (b"", b"short", b"\x01" * 100, stored(b"data") + b"x"):
            answer = http.post(f"{server.url}/v1/xorbs/default/{UNKNOWN}", headers=WRITE, content=body)
            assert answer.status_code == 400
            assert answer.json()["error"]
        assert not server.cas.has_xorb(hash_bytes(UNKNOWN))
        assert list(server.cas.tmp.iterdir()) == []

    def test_a_client_that_goes_away(self, server: Server) -> None:
        parts = urlsplit(server.url)
        with socket.create_connection((parts.hostname, parts.port), timeout=20) as connection:
            head = f"POST {parts.path}/v1/xorbs/default/{UNKNOWN} HTTP/1.1\r\nHost: here\r\n"
            head += "Authorization: Bearer writer\r\nContent-Length: 5000000\r\n\r\n"
            connection.sendall(head.encode() + bytes(2_000_000))
            wait_for(lambda: any(path.stat().st_size for path in server.cas.tmp.iterdir()))
        wait_for(lambda: not list(server.cas.tmp.iterdir()))
        assert not server.cas.has_xorb(hash_bytes(UNKNOWN))

    def test_bodies_that_are_too_large(
        self, server: Server, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(formats, "MAX_BODY", 1000)
        url = f"{server.url}/v1/xorbs/default/{UNKNOWN}"
        assert http.post(url, headers=WRITE, content=stored(bytes(2000))).status_code == 413
        assert server.calls[-1].received == 0
        pieces = iter([stored(bytes(2000))])
        assert http.post(url, headers=WRITE, content=pieces).status_code == 413
        assert http.post(url, headers=WRITE, content=stored(bytes(900))).json() == {"was_inserted": True}
        grant = {"length": 1001, "checksum": {"algo": "crc64nvme", "value": "1"}}
        asked = http.post(f"{server.url}/v1/xorb-grants/default/{'cd' * 32}", headers=WRITE, json=grant)
        assert asked.status_code == 413


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def stored(data: bytes) -> bytes:
    """A xorb of one chunk."""
    size = len(data).to_bytes(3, "little")
    return b"\0" + size + b"\0" + size + data


class TestGrants:
    BODY = stored(b"granted content")

    def ask(self, server: Server, http: httpx.Client, **changes: Any) -> httpx.Response:
        grant = {"length": len(self.BODY), "checksum": {"algo": "crc64nvme", "value": str(crc64nvme(self.BODY))}}
        return http.post(f"{server.url}/v1/xorb-grants/default/{UNKNOWN}", headers=WRITE, json=grant | changes)

    def test_from_the_grant_to_the_commit(self, server: Server, http: httpx.Client) -> None:
        answer = self.ask(server, http)
        assert answer.status_code == 201
        grant = answer.json()
        commit = f"{server.url}/v1/xorb-commits/default/{UNKNOWN}/grant/{grant['id']}"
        assert http.post(commit, headers=WRITE).status_code == 404
        assert http.request(grant["method"], grant["url"], content=self.BODY).status_code == 200
        assert http.post(commit, headers=WRITE).json() == {"was_inserted": True}
        assert http.request(grant["method"], grant["url"], content=self.BODY).status_code == 412
        assert self.ask(server, http).status_code == 200

    def test_other_bytes_than_granted(self, server: Server, http: httpx.Client) -> None:
        url = self.ask(server, http).json()["url"]
        for body in (stored(b"tampered content")[:-1], stored(b"grunted content"), self.BODY + b"x", b""):
            assert http.put(url, content=body).status_code == 400
        assert not server.cas.has_xorb(hash_bytes(UNKNOWN))
        assert http.put(url, content=self.BODY).status_code == 200

    def test_urls_that_were_not_given(
        self, server: Server, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        url = self.ask(server, http).json()["url"]
        parts = urlsplit(url)
        query = {name: values[0] for name, values in parse_qs(parts.query, keep_blank_values=True).items()}
        base = url.split("?")[0]
        for name in query:
            changed = query | {name: query[name][:-1] + ("1" if query[name][-1] != "1" else "2")}
            assert http.put(f"{base}?{urlencode(changed)}", content=self.BODY).status_code == 403, name
        assert http.put(base, content=self.BODY).status_code == 403
        other = f"{server.url}/uploads/{'cd' * 32}?{parts.query}"
        assert http.put(other, content=self.BODY).status_code == 403
        assert http.get(f"{server.url}/xorbs/{UNKNOWN}?{parts.query}").status_code == 403
        monkeypatch.setattr(routes, "URL_SECONDS", -1)
        expired = self.ask(server, http).json()["url"]
        assert http.put(expired, content=self.BODY).status_code == 403

    def test_requests_that_make_no_sense(self, server: Server, http: httpx.Client) -> None:
        assert self.ask(server, http, length=0).status_code == 400
        assert self.ask(server, http, length="12").status_code == 400
        assert self.ask(server, http, length=1 << 40).status_code == 413
        assert self.ask(server, http, checksum={"algo": "crc64nvme", "value": "0x1"}).status_code == 400
        url = f"{server.url}/v1/xorb-grants/default/{UNKNOWN}"
        assert http.post(url, headers=WRITE, content=b"[").status_code == 400

    def test_a_checksum_of_another_kind_is_left_alone(self, server: Server, http: httpx.Client) -> None:
        url = self.ask(server, http, checksum={"algo": "sha1", "value": "?"}).json()["url"]
        assert http.put(url, content=stored(b"longer than was granted")).status_code == 400
        assert http.put(url, content=self.BODY).status_code == 200


class TestDownloads:
    @pytest.fixture
    def file(self, tmp_path: Path, server: Server) -> tuple[str, bytes]:
        data = random.Random(2).randbytes(2 << 20)
        (tmp_path / "f").write_bytes(data)
        ((name, _, _),) = Client(tmp_path / "home").upload(server, tmp_path / "f")
        return name, data

    def test_reconstructions_outside_the_file(
        self, server: Server, http: httpx.Client, file: tuple[str, bytes]
    ) -> None:
        for version in ("v1", "v2"):
            url = f"{server.url}/{version}/reconstructions/{file[0]}"
            outside = http.get(url, headers=READ | {"Range": f"bytes={len(file[1])}-"})
            assert (outside.status_code, outside.headers["content-range"]) == (416, f"bytes */{len(file[1])}")
            assert http.get(url, headers=READ | {"Range": "bytes=0-0"}).status_code == 200
        empty = http.get(f"{server.url}/v2/reconstructions/{EMPTY_FILE}", headers=READ).json()
        assert empty == {"offset_into_first_range": 0, "terms": [], "xorbs": {}}

    def test_xorbs_in_ranges(self, server: Server, http: httpx.Client, file: tuple[str, bytes]) -> None:
        answer = http.get(f"{server.url}/v2/reconstructions/{file[0]}", headers=READ).json()
        ((xorb, fetches),) = answer["xorbs"].items()
        url = fetches[0]["url"]
        whole = server.cas.xorb_path(hash_bytes(xorb)).read_bytes()
        assert http.get(url).content == whole
        assert http.get(url, headers={"Range": "bytes=5-99"}).content == whole[5:100]
        assert http.get(url, headers={"Range": f"bytes={len(whole)}-"}).status_code == 416
        spans = [(n * 1000, n * 1000 + 9) for n in range(150)]
        ranges = "bytes=" + ", ".join(f"{start}-{end}" for start, end in spans)
        parts = http.get(url, headers={"Range": ranges})
        kind, _, boundary = parts.headers["content-type"].partition("; boundary=")
        assert (parts.status_code, kind) == (206, "multipart/byteranges")
        found = [part.split(b"\r\n\r\n", 1) for part in parts.content.split(f"--{boundary}".encode())[1:-1]]
        assert [part[1].removesuffix(b"\r\n") for part in found] == [whole[a : b + 1] for a, b in spans]
        assert all(f"bytes {a}-{b}/".encode() in head for (head, _), (a, b) in zip(found, spans, strict=True))

    def test_xorbs_without_a_signature(self, server: Server, http: httpx.Client, file: tuple[str, bytes]) -> None:
        answer = http.get(f"{server.url}/v2/reconstructions/{file[0]}", headers=READ).json()
        ((xorb, fetches),) = answer["xorbs"].items()
        for query in ("", "?exp=99999999999&sig=00", f"?{urlsplit(fetches[0]['url']).query}1"):
            assert http.get(f"{server.url}/xorbs/{xorb}{query}", headers=WRITE).status_code == 403

    def test_the_terms_are_the_file(self, server: Server, http: httpx.Client, file: tuple[str, bytes]) -> None:
        start, end = 300_000, 1_700_000
        headers = READ | {"Range": f"bytes={start}-{end - 1}"}
        old = http.get(f"{server.url}/v1/reconstructions/{file[0]}", headers=headers).json()
        data = b""
        for term in old["terms"]:
            (info,) = old["fetch_info"][term["hash"]]
            assert info["range"] == term["range"]
            layout = server.cas.layout(hash_bytes(term["hash"]))
            first, last = info["url_range"]["start"], info["url_range"]["end"]
            packed = http.get(info["url"], headers={"Range": f"bytes={first}-{last}"}).content
            assert len(packed) == last - first + 1 > HEADER
            chunks = formats.unpack(memoryview(packed), layout, term["range"]["start"], term["range"]["end"])
            data += b"".join(chunks)
        skip = old["offset_into_first_range"]
        assert data[skip : skip + end - start] == file[1][start:end]
        assert len(data) < end - start + 3 * 131_072
