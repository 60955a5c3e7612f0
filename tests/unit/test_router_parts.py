"""Parts of the router: where calls want to go, who may take them, who comes in, which headers go on, settings."""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from collections import Counter
from typing import Any

import httpx
import pytest

from inference_space.router.affinity import Affinity, Wish, ranked
from inference_space.router.app import create_app
from inference_space.router.cli import add_arguments
from inference_space.router.config import RouterConfig
from inference_space.router.replicas import Pool, Replica, Report
from inference_space.router.upstream import Client, passed_on
from sync.asgi import Guard, Receive, Scope, Send
from sync.errors import ConfigError, PeerUnavailable
from sync.schema.calls import CallResult, GenerateCall, Message, SyncStatus
from sync.session_keys import make_key
from sync.settings import load

pytestmark = pytest.mark.unit
TOKEN = "a-token-of-sixteen-and-more"
NAMES = [f"http://replica-{i}" for i in range(5)]


# --- affinity


def test_a_rank_depends_on_names_alone_and_a_lost_name_moves_only_its_keys() -> None:
    keys = [str(i).encode() for i in range(500)]
    first = {key: ranked(key, NAMES)[0] for key in keys}
    assert all(ranked(key, NAMES[::-1])[0] == first[key] for key in keys)
    assert min(Counter(first.values()).values()) > 50
    for key in keys:
        left = ranked(key, NAMES[1:])
        assert left == [name for name in ranked(key, NAMES) if name != NAMES[0]]
        assert first[key] == NAMES[0] or left[0] == first[key]


def call(*texts: str, ids: tuple[int, ...] = ()) -> GenerateCall:
    return GenerateCall(id="a", prefix_ids=ids, messages=tuple(Message(role="user", content=t) for t in texts))


def test_calls_with_one_beginning_have_one_key() -> None:
    affinity = Affinity(prefix=4, most=8)
    assert affinity.of_call(call(ids=(1, 2, 3, 4, 5))) == affinity.of_call(call("x", ids=(1, 2, 3, 4, 6)))
    assert affinity.of_call(call(ids=(1, 2, 3, 4))) != affinity.of_call(call(ids=(1, 2, 3, 5)))
    assert affinity.of_ids((1, 2, 3, 4, 9)) == affinity.of_call(call(ids=(1, 2, 3, 4)))
    wide = Affinity(prefix=64, most=8)
    assert wide.of_call(call("one task")) != wide.of_call(call("another task"))


def test_the_next_call_of_a_conversation_wants_to_go_where_the_last_was_answered() -> None:
    affinity = Affinity(prefix=4, most=2)
    answers = [CallResult(id="a", prompt_ids=(7, i), output_ids=(8, 9), finish_reason="stop") for i in range(3)]
    for i, answer in enumerate(answers):
        affinity.learn(answer, NAMES[i])
    lasts = [affinity.of_call(call("more", ids=a.prompt_ids + a.output_ids)).last for a in answers]
    assert lasts == ["", NAMES[1], NAMES[2]]  # two are remembered


@pytest.mark.parametrize(
    ("body", "more"),
    [
        ({"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]}, "messages"),
        ({"system": "s", "messages": [{"role": "user", "content": "u"}], "tools": [{"name": "t"}]}, "messages"),
        ({"instructions": "i", "input": [{"role": "user", "content": "u"}]}, "input"),
    ],
)
def test_a_dialogue_that_grows_keeps_its_key(body: dict[str, Any], more: str) -> None:
    affinity = Affinity(prefix=256, most=0)
    grown = body | {more: [*body[more], {"role": "assistant", "content": "a"}, {"role": "user", "content": "v"}]}
    other = body | {more: [{"role": "user", "content": "w"}]}
    key = affinity.of_body(json.dumps(body).encode())
    assert affinity.of_body(json.dumps(grown | {"stream": True}).encode()) == key
    assert affinity.of_body(json.dumps(other).encode()) != key


@pytest.mark.parametrize("body", [b"", b"\xff\x00", b"[1]", b'"x"', b"[" * 100_000, b'{"messages": 3}'])
def test_any_body_has_a_key(body: bytes) -> None:
    affinity = Affinity(prefix=256, most=0)
    assert affinity.of_body(body) == affinity.of_body(body)


# --- who may take a call


def report(version: str = "5@1", **facts: Any) -> Report:
    status = SyncStatus(ready=True, version=version, head=facts.pop("head", version), channel_uid="u", lag=0)
    return Report.model_validate(status.model_dump() | facts)


def pool(*reports: Report | None, max_lag: int = 2, hold: float = 0.0) -> Pool:
    client = Client("http://nobody", TOKEN, connections=1, connect=1, seconds=1)
    replicas = [Replica(name, client) for name in NAMES[: len(reports)]]
    for replica, found in zip(replicas, reports, strict=True):
        if found is not None:
            replica.saw(found, "")
    made = Pool(
        replicas, max_lag=max_lag, poll_seconds=1, poll_timeout=1, backoff=1, hold=hold, emit=lambda *_, **__: None
    )
    made.refresh()
    return made


def usable(made: Pool) -> list[int]:
    return [i for i, r in enumerate(made.replicas.values()) if not r.obstacle]


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (report("2@1"), "max_lag = 2"),
        (report("9@1", head="4@2"), None),
        (report(ready=False, reason="no weights"), "no weights"),
        (report(paused=True), "takes new weights"),
        (report(engine={"paused": True}), "takes new weights"),
        (report(channel_uid="other"), "another run"),
        (report("3@1"), ""),
        (None, "not asked yet"),
    ],
)
def test_a_replica_that_must_not_take_calls_says_why(other: Report | None, why: str | None) -> None:
    made = pool(report(), report(), other)
    replica = made.replicas[NAMES[2]]
    if why is None:  # it has seen a newer epoch's head: everybody serves an older one
        assert usable(made) == []
        assert "4@2" in replica.obstacle
    elif why:
        assert usable(made) == [0, 1]
        assert why in replica.obstacle
    else:
        assert usable(made) == [0, 1, 2]


def test_no_replica_takes_more_than_a_quarter_above_the_mean() -> None:
    made = pool(*[report()] * 4)
    rng = random.Random(3)
    for i in range(400):
        wish = Wish(b"hot" if i % 2 else rng.randbytes(8))
        found = made.choose(wish)
        assert found is not None
        found.in_flight += 1
        loads = [r.in_flight for r in made.replicas.values()]
        assert max(loads) <= -(-(i + 1) * 5 // 16)
    assert sum(loads) == 400


def test_the_first_of_the_rank_takes_the_call_and_the_next_when_it_may_not() -> None:
    made = pool(*[report()] * 3)
    order = ranked(b"k", NAMES[:3])
    wish = Wish(b"k")
    assert made.choose(wish) is made.replicas[order[0]]
    assert made.choose(Wish(b"k", last=order[2])) is made.replicas[order[2]]
    made.lost(made.replicas[order[0]], "broke", refused=False)
    assert made.choose(wish) is made.replicas[order[1]]
    assert made.choose(wish, frozenset({order[1]})) is made.replicas[order[2]]
    made.replicas[order[0]].saw(report(engine={"queued": 100}), "")
    made.refresh()
    assert made.choose(wish) is made.replicas[order[1]]
    made.replicas[order[0]].saw(report(engine={"queued": float("nan")}), "")
    made.refresh()
    assert made.choose(wish) is made.replicas[order[0]]


def test_a_call_waits_for_new_weights_but_not_for_the_dead() -> None:
    async def once() -> None:
        dead = pool(report(), hold=60)
        dead.lost(dead.replicas[NAMES[0]], "broke", refused=True)
        with pytest.raises(PeerUnavailable, match="broke"):
            await dead.find(Wish(b"k"))
        assert dead.replicas[NAMES[0]].away
        swapping = pool(report(paused=True), hold=60)
        waiting = asyncio.ensure_future(swapping.find(Wish(b"k")))
        await asyncio.sleep(0)
        assert not waiting.done()
        swapping.replicas[NAMES[0]].saw(report(), "")
        swapping.refresh()
        assert (await waiting).url == NAMES[0]
        with pytest.raises(PeerUnavailable, match="takes new weights"):
            await pool(report(paused=True), hold=0.0).find(Wish(b"k"))

    asyncio.run(once())


def test_one_call_meets_four_replicas_at_most() -> None:
    made = pool(*[report()] * 5)
    with pytest.raises(PeerUnavailable, match="4 replicas were tried"):
        asyncio.run(made.find(Wish(b"k"), frozenset(NAMES[:4])))


@pytest.mark.parametrize("queued", [10**400, -1, "many", None, True, [], 1e308, float("inf")])
def test_odd_counters_are_read_as_numbers_within_bounds(queued: object) -> None:
    assert 0 <= Report(ready=True, engine={"queued": queued}).count("queued") <= 10**9


# --- the door


def ask(path: str, headers: dict[str, str], method: str = "POST", body: bytes = b"") -> httpx.Response:
    async def seen(scope: Scope, receive: Receive, send: Send) -> None:
        said = [scope["path"], scope.get("deltawire_session", "-")]
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": json.dumps(said).encode()})

    async def once() -> httpx.Response:
        app = create_app(RouterConfig(replicas=("http://127.0.0.1:1",), max_body_bytes=100), TOKEN)
        assert isinstance(app, Guard)
        app._app = seen
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://router") as client:
            return await client.request(method, path, headers=headers, content=body)

    return asyncio.run(once())


KEY = make_key(TOKEN, "run-1.task")


@pytest.mark.parametrize(
    ("path", "headers"),
    [
        ("/v1/x", {"authorization": f"Bearer {KEY}"}),
        ("/v1/x", {"x-api-key": KEY}),
        ("/v1/x", {"x-deltawire-key": KEY, "authorization": f"Bearer {TOKEN}"}),
        (f"/s/{KEY}/v1/x", {}),
        (f"/s/{KEY}/v1/x", {"authorization": "Bearer whatever"}),
    ],
)
def test_a_session_key_comes_in_as_its_session(path: str, headers: dict[str, str]) -> None:
    answer = ask(path, headers)
    assert (answer.status_code, answer.json()) == (200, ["/v1/x", "run-1.task"])


def test_the_token_comes_in_without_a_session() -> None:
    assert ask(f"/s/{TOKEN}/v1/x", {}).json() == ["/v1/x", "-"]
    assert ask("/v1/x", {"x-api-key": TOKEN}).json() == ["/v1/x", "-"]


@pytest.mark.parametrize(
    "key", [KEY[:-1], KEY + "0", "run-2.task" + KEY[10:], make_key(TOKEN + "x", "run-1.task"), ".", TOKEN[:-1]]
)
def test_a_forged_key_does_not_come_in(key: str) -> None:
    assert ask("/v1/x", {"x-api-key": key}).status_code == 401
    assert ask(f"/s/{key}/v1/x", {}).status_code == 401


@pytest.mark.parametrize("path", ["/router/status", "/sync/status", "/ready", "/v1/%2e%2e/ready", "/v1"])
def test_a_session_key_opens_nothing_of_the_routers_owner(path: str) -> None:
    assert ask(path, {"x-api-key": KEY}, "GET").status_code == 403


def test_a_session_key_never_earns_the_tokens_cookie_and_has_a_body_limit() -> None:
    for answer in (ask(f"/v1/x?key={KEY}", {}, "GET"), ask(f"/s/{KEY}/v1/x?key={KEY}", {}, "GET")):
        assert (answer.status_code, answer.json()) == (200, ["/v1/x", "run-1.task"])
        assert "set-cookie" not in answer.headers
        assert TOKEN not in str(answer.headers) + answer.text
    assert ask("/v1/x", {"x-api-key": KEY}, body=b"x" * 101).status_code == 413


def test_headers_of_one_connection_and_keys_stay_here() -> None:
    given = [
        (b"Authorization", b"Bearer x"), (b"x-api-key", b"x"), (b"X-Deltawire-Key", b"x"), (b"cookie", b"a=b"),
        (b"Host", b"h"), (b"connection", b"close, x-mine"), (b"x-mine", b"1"), (b"te", b"trailers"),
        (b"transfer-encoding", b"chunked"), (b"content-length", b"3"), (b"content-type", b"application/json"),
    ]  # fmt: skip
    assert passed_on(given) == [(b"content-type", b"application/json"), (b"accept-encoding", b"identity")]
    assert passed_on([(b"accept-encoding", b"gzip")]) == [(b"accept-encoding", b"gzip")]


# --- settings


def settings(*flags: str, **environ: str) -> RouterConfig:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return load(RouterConfig, "router", parser.parse_args(flags), environ)


def test_replicas_are_listed_with_commas_or_as_json() -> None:
    wanted = ("http://a:1", "https://b/x")
    assert settings("--replicas", "http://a:1,https://b/x/").replicas == wanted
    assert settings("--replicas", '["http://a:1", "https://b/x"]').replicas == wanted
    assert settings(DELTAWIRE_ROUTER_REPLICAS="http://a:1, https://b/x").replicas == wanted


@pytest.mark.parametrize(
    "text", ["", "a:1", "ftp://a", "http://", "http://u:p@a", "http://a?k=1", "http://a,http://a/", "http://a:x"]
)
def test_a_wrong_list_of_replicas_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="replicas"):
        settings("--replicas", text)
