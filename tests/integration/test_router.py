"""The router before real inference Spaces, and before peers that are slow, rude, streaming or gone."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import uvicorn
from support_tiny import make_checkpoint, publishing, state_of, wait_until

from inference_space.router.app import create_app
from inference_space.router.config import RouterConfig
from sync import Publisher, Stamp, open_store
from sync.asgi import App, Receive, Scope, Send
from sync.schema.calls import (
    CallResult,
    GenerateCall,
    GenerateRequest,
    GenerateResponse,
    Message,
    Sampling,
    ScoreResponse,
    SyncStatus,
)
from sync.schema.sessions import Session, SessionKey, SessionLine, SessionPage
from sync.serving import bind, url_of
from sync.session_keys import make_key, session_of

pytestmark = pytest.mark.integration
TOKEN = "a-token-of-sixteen-and-more"
KEY = {"Authorization": f"Bearer {TOKEN}"}
ENVIRON = {**os.environ, "DELTAWIRE_TOKEN": TOKEN, "OMP_NUM_THREADS": "1"}
ROOT = Path(__file__).resolve().parents[2]


@contextmanager
def served(app: App) -> Iterator[str]:
    """An app on a port of its own, in a thread."""
    with bind("127.0.0.1", 0) as listener:
        settings = uvicorn.Config(app, log_level="critical", ws="none", timeout_graceful_shutdown=1)
        server = uvicorn.Server(settings)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            wait_until(lambda: server.started)
            yield url_of(listener)
        finally:
            server.should_exit = True
            thread.join()


class Router:
    """A router in this process, a client of it, and one that sends no token."""

    def __init__(self, http: httpx.Client, bare: httpx.Client) -> None:
        self.http, self.bare = http, bare

    def lines(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.http.get("/router/status").json()["replicas"]
        return found

    def usable(self) -> list[str]:
        return [line["url"] for line in self.lines() if line["usable"]]

    def answered(self) -> list[int]:
        return [line["answered"] for line in self.lines()]

    def generate(self, *calls: GenerateCall) -> list[CallResult]:
        answer = self.http.post("/v1/generate", content=GenerateRequest(calls=calls).model_dump_json())
        assert answer.status_code == 200, answer.text
        return list(GenerateResponse.model_validate_json(answer.content).calls)


@contextmanager
def routing(*urls: str, wait: int | None = None, **settings: Any) -> Iterator[Router]:
    """A router before `urls`; waits until `wait` of them (all) are usable."""
    quick = {"poll_seconds": 0.05, "backoff_seconds": 0.2, "hold_seconds": 10.0}
    config = RouterConfig.model_validate({"replicas": urls} | quick | settings)
    with ExitStack() as stack:
        url = stack.enter_context(served(create_app(config, TOKEN)))
        clients = [httpx.Client(base_url=url, headers=headers, timeout=60) for headers in (KEY, {})]
        router = Router(*(stack.enter_context(client) for client in clients))
        wait_until(lambda: len(router.usable()) >= (len(urls) if wait is None else wait))
        yield router


# --- real replicas


class Space:
    """`deltawire inference` as a process on a port that stays."""

    def __init__(self, run: Path, folder: Path, port: int = 0) -> None:
        self.run, self.folder, self.port = run, folder, port
        self.url = ""
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it; `arrive` waits until it answers."""
        ready = self.folder.with_suffix(".json")
        ready.unlink(missing_ok=True)
        flags = ["--run", self.run, "--folder", self.folder, "--ready-file", ready, "--port", self.port]
        command = [sys.executable, ROOT / "deltawire.py", "inference", *flags, "--poll-seconds", 3600, "--log", "none"]
        self.process = subprocess.Popen([str(word) for word in command], env=ENVIRON)

    def arrive(self) -> None:
        ready, child = self.folder.with_suffix(".json"), self.process
        assert child is not None
        wait_until(lambda: ready.exists() or child.poll() is not None, 120)
        self.url = json.loads(ready.read_text())["url"]
        self.port = int(self.url.rpartition(":")[2])
        wait_until(lambda: self.get("/ready").status_code == 200, 120)

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, headers=KEY, timeout=60)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()


class Fleet:
    """Two Spaces of one run, its publisher, and what it publishes."""

    def __init__(self, spaces: list[Space], publisher: Publisher, checkpoints: list[Path]) -> None:
        self.spaces, self.publisher, self.checkpoints = spaces, publisher, checkpoints

    @property
    def urls(self) -> list[str]:
        return [space.url for space in self.spaces]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    root = tmp_path_factory.mktemp("fleet")
    checkpoints = [make_checkpoint(root / f"checkpoint-{seed}", seed) for seed in (0, 1)]
    store = open_store(str(root / "run"), create=True, writable=True)
    with ExitStack() as stack:
        publisher = stack.enter_context(publishing(store, checkpoints[0]))
        spaces = [Space(root / "run", root / f"mirror-{i}") for i in range(2)]
        for space in spaces:
            stack.callback(space.kill)
            space.start()
        for space in spaces:
            space.arrive()
        yield Fleet(spaces, publisher, checkpoints)


def task(i: int, **sampling: Any) -> GenerateCall:
    text = f"Guess a number between {i} and 99, task {i}."
    settings = Sampling.model_validate({"max_tokens": 8, "temperature": 0} | sampling)
    return GenerateCall(id=f"c{i}", messages=(Message(role="user", content=text),), sampling=settings)


def test_one_beginning_goes_to_one_replica_and_the_conversation_stays_there(fleet: Fleet) -> None:
    with routing(*fleet.urls) as router:
        where = set()
        for i in range(8):
            before = router.answered()
            call = task(i)
            for _ in range(3):
                result = router.generate(call)[0]
                assert result.error is None
                message = Message(role="user", content="higher")
                prefix = result.prompt_ids + result.output_ids
                call = call.model_copy(update={"prefix_ids": prefix, "messages": (message,)})
            router.generate(task(i))
            gained = [now - then for now, then in zip(router.answered(), before, strict=True)]
            assert sorted(gained) == [0, 4]
            where.add(gained.index(4))
        assert where == {0, 1}


def test_a_batch_is_split_and_merged_in_order(fleet: Fleet) -> None:
    bad = GenerateCall(id="bad", prefix_ids=(5, 999_999))
    calls = [*(task(i) for i in range(12)), bad, *(task(i) for i in range(12, 24))]
    calls.append(task(0))  # ids need not differ
    with routing(*fleet.urls) as router:
        found = router.generate(*calls)
        assert all(n > 5 for n in router.answered())
    body = GenerateRequest(calls=tuple(calls)).model_dump_json()
    answer = httpx.post(fleet.urls[0] + "/v1/generate", headers=KEY, content=body, timeout=60)
    wanted = GenerateResponse.model_validate_json(answer.content).calls
    assert [r.id for r in found] == [c.id for c in calls]
    assert found[12].error is not None
    for one, other in zip(found, wanted, strict=True):
        same = {"prompt_ids", "output_ids", "weight_versions", "finish_reason", "text", "error"}
        assert one.model_dump(include=same) == other.model_dump(include=same)
        assert np.allclose(one.logprobs, other.logprobs, atol=1e-4)


def test_scores_chat_and_refusals_come_through(fleet: Fleet) -> None:
    with routing(*fleet.urls) as router:
        body = {"sequences": [{"ids": [5, 6, 7, 8], "start": 2}, {"ids": [9, 10]}]}
        scores = ScoreResponse.model_validate_json(router.http.post("/v1/score", json=body).content)
        assert [len(x) for x in scores.logprobs] == [2, 1]
        chat = {"model": "policy", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}
        assert router.http.post("/v1/chat/completions", json=chat).json()["choices"]
        for path, content in (("generate", '{"calls": []}'), ("score", "{"), ("generate", b"\xff")):
            answer = router.http.post(f"/v1/{path}", content=content)
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_request")
        models = router.http.get("/v1/models").json()
        assert [m["id"] for m in models["data"]] == ["policy"]
        assert SyncStatus.model_validate_json(router.http.get("/sync/status").content).ready
        assert router.http.get("/ready").json()["usable"] == 2


def test_one_that_lags_is_skipped_until_it_has_caught_up(fleet: Fleet) -> None:
    with routing(*fleet.urls, max_lag=0) as router:
        fleet.publisher.flush(state_of(fleet.checkpoints[1]), Stamp(step=1, sync=1))
        assert httpx.post(fleet.urls[0] + "/sync/poke", headers=KEY).status_code == 200
        wait_until(lambda: router.usable() == fleet.urls[:1])
        assert router.lines()[1]["lag"] == 1
        results = router.generate(*(task(i) for i in range(12)))
        assert {s.version for r in results for s in r.weight_versions} == {"1@1"}
        assert set(router.http.post("/sync/poke").json()["replicas"].values()) == {"poked"}
        wait_until(lambda: router.usable() == fleet.urls)
        router.generate(*(task(i) for i in range(12)))
        assert router.answered()[1] > 0


def converse(url: str, turns: int, *, stream: bool) -> None:
    with openai.OpenAI(base_url=url, api_key="any", max_retries=0, timeout=60) as client:
        said: list[Any] = [{"role": "user", "content": "Guess a number between 1 and 99."}]
        for _ in range(turns):
            if stream:
                parts = client.chat.completions.create(model="m", messages=said, max_tokens=6, stream=True)
                text = "".join(part.choices[0].delta.content or "" for part in parts)
            else:
                text = str(
                    client.chat.completions.create(model="m", messages=said, max_tokens=6).choices[0].message.content
                )
            said += [{"role": "assistant", "content": text}, {"role": "user", "content": "higher"}]


def test_sessions_of_agents_are_one_chain_each_on_real_replicas(fleet: Fleet) -> None:
    with routing(*fleet.urls) as router, ThreadPoolExecutor(8) as threads:
        made = [SessionKey.model_validate_json(router.http.post("/v1/sessions", json={}).content) for _ in range(12)]
        running = [
            threads.submit(converse, f"{router.bare.base_url}/s/{key.key}/v1", 3, stream=bool(i % 2))
            for i, key in enumerate(made)
        ]
        for task in running:
            task.result(120)
        homes = [{line.id for line in page_of(httpx.get(f"{u}/v1/sessions", headers=KEY))} for u in fleet.urls]
        assert all(homes)
        assert sorted(name for home in homes for name in home) == sorted(key.id for key in made)
        for key in made:
            found = Session.model_validate_json(router.http.get(f"/v1/sessions/{key.id}").content)
            assert [len(chain.calls) for chain in found.chains] == [3]
            assert router.http.delete(f"/v1/sessions/{key.id}").status_code == 204
            assert router.http.get(f"/v1/sessions/{key.id}").status_code == 404
            gone = router.bare.post("/v1/chat/completions", headers={"x-api-key": key.key}, json=CHAT)
            assert gone.status_code == 404
        assert page_of(router.http.get("/v1/sessions")) == ()


def page_of(answer: httpx.Response) -> tuple[SessionLine, ...]:
    return SessionPage.model_validate_json(answer.content).sessions


def test_no_call_fails_when_a_replica_is_killed_under_them(fleet: Fleet) -> None:
    victim = fleet.spaces[1]
    with routing(*fleet.urls) as router, ThreadPoolExecutor(32) as threads:
        calls = [task(i, max_tokens=150, temperature=1.0) for i in range(32)]
        running = [threads.submit(router.generate, call) for call in calls]
        wait_until(lambda: router.lines()[1]["in_flight"] > 8)
        victim.kill()
        results = [r for future in running for r in future.result()]
        assert [r.id for r in results] == [c.id for c in calls]
        assert [r.error for r in results] == [None] * 32
        wait_until(lambda: router.usable() == fleet.urls[:1])
        session = next(s for i in range(99) if home_of(s := f"s{i}", fleet.urls) == victim.url)
        away = router.http.get(f"/v1/sessions/{session}")
        assert (away.status_code, away.headers["retry-after"]) == (503, "1")
        victim.start()
        victim.arrive()
        wait_until(lambda: router.usable() == fleet.urls)
        assert all(line["in_flight"] == 0 for line in router.lines())


def home_of(session: str, urls: list[str]) -> str:
    from inference_space.router.affinity import ranked

    return ranked(session.encode(), urls)[0]


# --- every route wants the token


def test_every_route_but_health_wants_the_token() -> None:
    with Peer().serving() as peer, routing(peer.url) as router:
        said = router.http.get("/nowhere").json()["error"]["message"].partition("known: ")[2]
        routes = re.findall(r"(GET|POST|HEAD) (/[^\s,]*)", said)
        assert len(routes) > 12
        extra = [("GET", "/v1/sessions/x"), ("DELETE", "/v1/sessions/x"), ("GET", "/nowhere"), ("GET", "/")]
        ways: list[dict[str, str]] = [{}, {"Authorization": "Bearer wrong"}, {"x-api-key": TOKEN[:-1]}]
        ways.append({"x-deltawire-key": make_key("another-token-of-sixteen", "s")})
        before = len(peer.seen)
        for method, path in [*routes, *extra]:
            for headers in ways:
                answer = router.bare.request(method, path, headers=headers)
                assert answer.status_code == (200 if path == "/health" else 401)
        assert [p for _, p, _ in peer.seen[before:] if p not in ("/ready", "/sync/status")] == []
        assert router.http.get("/v1/models/policy").json()["path"] == "/v1/models/policy"
        assert router.http.head("/").status_code == 200
        for headers in ({"x-api-key": TOKEN}, {"X-Deltawire-Key": TOKEN}):
            assert router.bare.get("/ready", headers=headers).status_code == 200
        assert router.bare.get(f"/s/{TOKEN}/ready").status_code == 200
        assert router.http.get("/v1/generate").json()["error"]["code"] == "method_not_allowed"


def test_a_body_beyond_the_limit_is_refused_here() -> None:
    with Peer().serving() as peer, routing(peer.url, max_body_bytes=1000) as router:
        answer = router.http.post("/v1/chat/completions", content=iter([b" " * 600] * 2))
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")
        assert not [p for _, p, _ in peer.seen if p.startswith("/v1/")]


# --- peers that behave as a test wants


class Peer:
    """What a replica looks like from outside; `calls` answers whatever is not a question about its state."""

    def __init__(self, calls: Callable[[Scope, Receive, Send], Awaitable[None]] | None = None, **status: Any) -> None:
        self.status: dict[str, Any] = {"ready": True, "channel_uid": "u", "version": "3@1", "head": "3@1"} | status
        self.calls = calls or self.echo
        self.seen: list[tuple[str, str, dict[str, str]]] = []
        self.url = ""

    @contextmanager
    def serving(self) -> Iterator[Peer]:
        with served(self) as self.url:
            yield self

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            while (kind := (await receive())["type"]) != "lifespan.shutdown":
                await send({"type": f"{kind}.complete"})
            await send({"type": "lifespan.shutdown.complete"})
            return
        headers = {k.decode(): v.decode() for k, v in scope["headers"]}
        self.seen.append((scope["method"], scope["path"], headers))
        if scope["path"] == "/ready":
            await answer_with(send, {"status": "ready"}, 200 if self.status["ready"] else 503)
        elif scope["path"] == "/sync/status":
            await answer_with(send, self.status)
        else:
            await self.calls(scope, receive, send)

    async def echo(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await body_of(receive)
        facts = {"url": self.url, "path": scope["path"], "query": scope["query_string"].decode(), "body": body.decode()}
        await answer_with(send, facts)

    def count(self, path: str) -> int:
        return sum(p == path for _, p, _ in list(self.seen))


async def body_of(receive: Receive) -> bytes:
    parts = b""
    while (message := await receive())["type"] == "http.request":
        parts += message.get("body", b"")
        if not message.get("more_body"):
            break
    return parts


async def answer_with(send: Send, what: object, status: int = 200) -> None:
    headers = [(b"content-type", b"application/json"), (b"set-cookie", b"a=b"), (b"x-kept", b"1")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(what).encode()})


CHAT = {"messages": [{"role": "user", "content": "hello"}]}


class Sessions:
    """A peer's session routes, with bodies as the wire has them."""

    def __init__(self, peer: Peer) -> None:
        self.peer, self.lines = peer, dict[str, SessionLine]()
        peer.calls = self

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await body_of(receive)
        path = scope["path"]
        if (scope["method"], path) == ("POST", "/v1/sessions"):
            name = json.loads(body)["id"]
            count = float(len(self.lines) + 10 * self.peer.url.endswith("1"))
            self.lines[name] = SessionLine(
                id=name, purpose="training", created_at=count, active=0, calls=0, output_tokens=0
            )
            key = make_key(TOKEN, name)
            await answer_with(send, SessionKey(id=name, key=key, path=f"/s/{key}", idle_seconds=60).model_dump())
        elif path == "/v1/sessions":
            await answer_with(send, SessionPage(sessions=tuple(self.lines.values())).model_dump())
        else:
            headers = {k.decode(): v.decode() for k, v in scope["headers"]}
            facts = {"url": self.peer.url, "path": path, "key": headers.get("x-deltawire-key")}
            await answer_with(send, facts)


def test_a_session_stays_with_its_replica_and_keeps_its_key() -> None:
    with ExitStack() as stack:
        peers = [stack.enter_context(Peer().serving()) for _ in range(3)]
        held = [Sessions(peer).lines for peer in peers]
        router = stack.enter_context(routing(*(peer.url for peer in peers)))
        made = [router.http.post("/v1/sessions", json={}).json() for _ in range(24)]
        named = router.http.post("/v1/sessions", json={"id": "mine"}).json()
        assert named["id"] == "mine"
        assert all(held)
        for key in (*made, named):
            (home,) = (p.url for p, lines in zip(peers, held, strict=True) if key["id"] in lines)
            secret = key["key"]
            assert session_of(TOKEN, secret) == key["id"]
            for headers in ({"authorization": f"Bearer {secret}"}, {"x-api-key": secret}):
                said = router.bare.post("/v1/chat/completions", headers=headers, json=CHAT).json()
                assert said == {"url": home, "path": "/v1/chat/completions", "key": secret}
            said = router.bare.post(f"/s/{secret}/v1/messages", headers={"x-api-key": "none"}, json=CHAT).json()
            assert said == {"url": home, "path": "/v1/messages", "key": secret}
            said = router.http.get(f"/v1/sessions/{key['id']}").json()
            assert said == {"url": home, "path": f"/v1/sessions/{key['id']}", "key": TOKEN}
            for method, path in (("POST", "/sync/poke"), ("GET", "/router/status"), ("GET", "/v1/%2e%2e/ready")):
                refused = router.bare.request(method, path, headers={"x-api-key": secret})
                assert (refused.status_code, refused.json()["error"]["code"]) == (403, "forbidden")
        page = SessionPage.model_validate_json(router.http.get("/v1/sessions").content).sessions
        assert {line.id for line in page} == {key["id"] for key in (*made, named)}
        assert [line.created_at for line in page] == sorted((line.created_at for line in page), reverse=True)
        for body in (b"[]", b"{", b'{"id": 3}'):
            assert router.http.post("/v1/sessions", content=body).status_code == 400


def test_a_session_whose_replica_is_away_is_nobody_elses() -> None:
    with ExitStack() as stack:
        here = stack.enter_context(Peer().serving())
        lines = Sessions(here).lines
        closed = stack.enter_context(bind("127.0.0.1", 0))
        gone = url_of(closed)
        closed.close()
        router = stack.enter_context(routing(here.url, gone, wait=1))
        wait_until(lambda: bool(router.lines()[1]["away"]))
        name = next(s for i in range(99) if home_of(s := f"s{i}", [here.url, gone]) == gone)
        headers = {"x-api-key": make_key(TOKEN, name)}
        for answer in (
            router.bare.post("/v1/chat/completions", headers=headers, json=CHAT),
            router.http.post("/v1/sessions", json={"id": name}),
            router.http.get(f"/v1/sessions/{name}"),
        ):
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
            assert gone in answer.json()["error"]["message"]
        assert not here.count("/v1/chat/completions")
        for _ in range(12):  # ids drawn by the router live where somebody is
            assert router.http.post("/v1/sessions", json={}).json()["id"] in lines
        listed = router.http.get("/v1/sessions")
        assert len(listed.json()["sessions"]) == 12
        assert listed.headers["x-deltawire-away"] == gone


def test_a_session_call_that_may_have_arrived_is_not_sent_again() -> None:
    asked: list[bytes] = []
    with rude(b"", asked) as url, routing(url) as router:
        headers = {"x-api-key": make_key(TOKEN, "s")}
        answer = router.bare.post("/v1/chat/completions", headers=headers, json=CHAT)
        assert (answer.status_code, answer.json()["error"]["code"]) == (502, "internal")
        assert len(asked) == 1


async def closing(scope: Scope, receive: Receive, send: Send) -> None:
    """Take the request and give an answer that ends before its promised end."""
    await body_of(receive)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"10")]})
    await send({"type": "http.response.body", "body": b"{", "more_body": True})


def test_a_stream_passes_through_as_it_comes() -> None:
    more = threading.Event()

    async def stream(scope: Scope, receive: Receive, send: Send) -> None:
        await body_of(receive)
        headers = [(b"content-type", b"text/event-stream"), (b"connection", b"x-hop"), (b"x-hop", b"1")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True})
        await asyncio.to_thread(more.wait, 30)
        await send({"type": "http.response.body", "body": b"data: 2\n\n"})

    with ExitStack() as stack:
        peer = stack.enter_context(Peer(stream).serving())
        router = stack.enter_context(routing(peer.url))
        answer = stack.enter_context(router.http.stream("POST", "/v1/chat/completions", json=CHAT))
        assert answer.headers["content-type"] == "text/event-stream"
        assert not {"x-hop", "set-cookie"} & set(answer.headers)
        parts = answer.iter_raw()
        assert next(parts) == b"data: 1\n\n"  # the peer has not said more yet
        more.set()
        assert b"".join(parts) == b"data: 2\n\n"


@pytest.mark.parametrize("begun", [False, True])
def test_a_client_that_goes_ends_its_call_at_the_replica(begun: bool) -> None:
    ended = threading.Event()

    async def forever(scope: Scope, receive: Receive, send: Send) -> None:
        await body_of(receive)
        if begun:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b": ping\n\n", "more_body": True})
        while (await receive())["type"] != "http.disconnect":
            pass
        ended.set()

    with Peer(forever).serving() as peer, routing(peer.url) as router:
        with pytest.raises(httpx.ReadTimeout):
            router.http.post("/v1/chat/completions", json=CHAT, timeout=0.5)
        assert ended.wait(30)
        wait_until(lambda: router.lines()[0]["in_flight"] == 0)


def test_a_stream_that_breaks_is_cut_and_never_begun_again() -> None:
    with Peer(closing).serving() as one, Peer(closing).serving() as two, routing(one.url, two.url) as router:
        with pytest.raises(httpx.RemoteProtocolError):
            router.http.post("/v1/chat/completions", json=CHAT)
        assert one.count("/v1/chat/completions") + two.count("/v1/chat/completions") == 1


@pytest.mark.parametrize("status", [503, 429])
def test_who_turns_calls_away_is_passed_by(status: int) -> None:
    async def busy(scope: Scope, receive: Receive, send: Send) -> None:
        await body_of(receive)
        code = {503: "not_ready", 429: "overloaded"}[status]
        await answer_with(send, {"error": {"code": code, "message": "not now"}}, status)

    with Peer(busy).serving() as one, Peer().serving() as two, routing(one.url, two.url) as router:
        for i in range(12):
            body = {"messages": [{"role": "user", "content": str(i)}]}
            assert router.http.post("/v1/chat/completions", json=body).json()["url"] == two.url
        two.calls = busy
        wait_until(lambda: len(router.usable()) == 2)
        answer = router.http.post("/v1/chat/completions", json=CHAT)
        assert (answer.status_code, answer.headers["retry-after"]) == (status, "1")
        generate = router.http.post("/v1/generate", content=GenerateRequest(calls=(task(1),)).model_dump_json())
        assert generate.status_code in (status, 503)


def test_who_takes_new_weights_gets_no_new_calls_and_sessions_wait_for_it() -> None:
    with Peer().serving() as one, Peer().serving() as two, routing(one.url, two.url) as router:
        one.status["paused"] = True
        wait_until(lambda: router.usable() == [two.url])
        for i in range(8):
            body = {"messages": [{"role": "user", "content": str(i)}]}
            assert router.http.post("/v1/chat/completions", json=body).json()["url"] == two.url
        name = next(s for i in range(99) if home_of(s := f"s{i}", [one.url, two.url]) == one.url)
        headers = {"x-api-key": make_key(TOKEN, name)}
        with ThreadPoolExecutor(1) as threads:
            waiting = threads.submit(router.http.post, "/v1/chat/completions", headers=headers, json=CHAT)
            polls = one.count("/ready")
            wait_until(lambda: one.count("/ready") > polls + 3)
            assert not one.count("/v1/chat/completions")
            one.status["paused"] = False
            assert waiting.result().json()["url"] == one.url


def test_a_slow_replica_gets_no_calls() -> None:
    slow = threading.Event()

    class Slow(Peer):
        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "http" and slow.is_set():
                await asyncio.sleep(3600)
            await super().__call__(scope, receive, send)

    with ExitStack() as stack:
        one, two = (stack.enter_context(peer.serving()) for peer in (Slow(), Peer()))
        router = stack.enter_context(routing(one.url, two.url, poll_timeout_seconds=0.2))
        slow.set()
        wait_until(lambda: router.usable() == [two.url])
        for i in range(8):
            body = {"messages": [{"role": "user", "content": str(i)}]}
            assert router.http.post("/v1/chat/completions", json=body).json()["url"] == two.url
        assert "poll_timeout_seconds" in router.lines()[0]["obstacle"]
        slow.clear()
        wait_until(lambda: len(router.usable()) == 2)


def test_an_answer_that_does_not_come_is_late() -> None:
    async def never(scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    with Peer(never).serving() as peer, routing(peer.url, request_seconds=0.5) as router:
        chat = router.http.post("/v1/chat/completions", json=CHAT)
        body = GenerateRequest(calls=(task(1),)).model_dump_json()
        score = {"sequences": [{"ids": [1, 2]}]}
        rest = [router.http.post("/v1/generate", content=body), router.http.post("/v1/score", json=score)]
        for answer in (chat, *rest):
            assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline")
        assert router.lines()[0]["in_flight"] == 0


# --- peers that are no replicas

RUDE = {
    "nothing": b"",
    "noise": b"\x00\xff" * 400,
    "endless head": b"HTTP/1.1 200 OK\r\n" + b"x-a: b\r\n" * 40_000,
    "half": b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{",
    "no JSON": b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nabc",
    "a redirect": b"HTTP/1.1 302 Found\r\nlocation: http://127.0.0.1:1/\r\ncontent-length: 0\r\n\r\n",
    "an odd status": b"HTTP/1.1 299 Fine\r\ncontent-length: 0\r\n\r\n",
    "wrong calls": b'HTTP/1.1 200 OK\r\ncontent-length: 12\r\n\r\n{"calls":[]}',
    "wrong scores": b'HTTP/1.1 200 OK\r\ncontent-length: 33\r\n\r\n{"version":"1@1","logprobs":[[]]}',
}


@contextmanager
def rude(said: bytes, asked: list[bytes] | None = None, *, always: bool = False) -> Iterator[str]:
    """A server that looks like a replica until it is asked for tokens (`always`: never), then says `said` and hangs
    up. `asked` gets what it was asked."""
    status = json.dumps({"ready": True, "channel_uid": "u", "version": "3@1", "head": "3@1"}).encode()
    polite = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%s" % (len(status), status)
    with bind("127.0.0.1", 0) as listener:

        def serve() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    connection.settimeout(10)
                    head = connection.recv(65536)
                    if asked is not None and head.startswith(b"POST"):
                        asked.append(head)
                    with suppress(OSError):  # who reads garbage may have gone
                        connection.sendall(said if always or head.startswith(b"POST") else polite)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield url_of(listener)
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


async def honest(scope: Scope, receive: Receive, send: Send) -> None:
    asked = json.loads(await body_of(receive))
    if scope["path"] == "/v1/score":
        logprobs = [[-1.0] * (len(s["ids"]) - s.get("start", 1)) for s in asked["sequences"]]
        await answer_with(send, {"version": "3@1", "logprobs": logprobs})
    else:
        calls = [{"id": c["id"], "prompt_ids": [1], "finish_reason": "stop"} for c in asked["calls"]]
        await answer_with(send, {"calls": calls})


@pytest.mark.parametrize("kind", RUDE)
def test_garbage_is_never_passed_on_where_an_answer_is_read(kind: str) -> None:
    with rude(RUDE[kind]) as bad, Peer(honest).serving() as peer, routing(bad, peer.url) as router:
        calls = [task(i) for i in range(12)]
        assert [r.id for r in router.generate(*calls)] == [c.id for c in calls]
        assert all(router.generate(call)[0].error is None for call in calls)
        for i in range(6):
            answer = router.http.post("/v1/score", json={"sequences": [{"ids": [i, 2]}]})
            assert answer.json()["logprobs"] == [[-1.0]]
        assert router.lines()[0]["failed"] > 0


@pytest.mark.parametrize("kind", ["nothing", "noise", "no JSON", "a redirect"])
def test_whoever_gives_no_status_is_no_replica(kind: str) -> None:
    with rude(RUDE[kind], always=True) as url, Peer().serving() as peer, routing(url, peer.url, wait=1) as router:
        wait_until(lambda: router.lines()[0]["away"])
        assert router.usable() == [peer.url]
        assert router.http.post("/v1/chat/completions", json=CHAT).json()["url"] == peer.url


# --- the process


def test_the_process_routes_and_ends_cleanly(tmp_path: Path) -> None:
    ready = tmp_path / "ready.json"
    command = [sys.executable, str(ROOT / "deltawire.py"), "router", "--log", "json", "--ready-file", str(ready)]
    with Peer().serving() as peer:
        command += ["--replicas", peer.url, "--poll-seconds", "0.05"]
        with subprocess.Popen(command, env=ENVIRON, stderr=subprocess.PIPE, text=True) as child:
            wait_until(lambda: ready.exists() or child.poll() is not None)
            url = json.loads(ready.read_text())["url"]
            wait_until(lambda: httpx.get(url + "/ready", headers=KEY).status_code == 200)
            assert httpx.post(url + "/v1/chat/completions?a=1", headers=KEY, json=CHAT).json()["query"] == "a=1"
            child.send_signal(signal.SIGTERM)
            assert child.stderr is not None
            lines = child.stderr.read().splitlines()
            assert child.wait(60) == 0
    assert [json.loads(line)["event"] for line in lines] == ["listening", "replica_in", "stopped"]
    assert TOKEN not in "".join(lines)


def test_settings_are_printed_and_wrong_ones_refused() -> None:
    def run(*flags: str, environ: dict[str, str] = ENVIRON) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(ROOT / "deltawire.py"), "router", *flags]
        return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)

    shown = run("--replicas", "http://a:1,http://b:2", "--print-config")
    assert 'replicas = ["http://a:1", "http://b:2"]' in shown.stdout
    missing = {k: v for k, v in ENVIRON.items() if k != "DELTAWIRE_TOKEN"}
    assert "DELTAWIRE_TOKEN is not set" in run("--replicas", "http://a:1", environ=missing).stderr
    assert "'replicas' is missing" in run().stderr
