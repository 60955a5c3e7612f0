"""The inspector's HTML and its reader: escaping, unknown values, long content, and what a bad service gives."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from html.parser import HTMLParser
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from env_space.ui import render
from env_space.ui.reader import Reader
from sync.errors import DeltawireError, InvalidRequest, PeerUnavailable, RejectError
from sync.schema.calls import Message, VersionSpan
from sync.schema.rollouts import Chain, Rollout, RolloutPage, RolloutSummary, RunInfo, ServiceStatus
from sync.serving import bind, url_of

NOW = 1_000_000.0
HOSTILE = "<script>alert(1)</script><img src=x onerror='alert(2)'>\" ' & {{value}} ${1+1}"


class Seen(HTMLParser):
    """Tags, attributes and text of a piece of HTML, as a browser would take them."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.open: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.open.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data

    def all(self, name: str) -> list[str]:
        return [value or "" for key, value in self.attributes if key == name]


def chain(ids: tuple[int, ...] = (5, 6, 7, 8), sampled: int = 2, version: str = "3@1") -> Chain:
    context = len(ids) - sampled
    return Chain(
        ids=ids,
        mask=(0,) * context + (1,) * sampled,
        logprobs=(0.0,) * context + (-0.25,) * sampled,
        weight_versions=(VersionSpan(version=version, start=context, end=len(ids)),) if sampled else (),
    )


def rollout(**changes: Any) -> Rollout:
    plain: dict[str, Any] = {
        "id": "r-1",
        "run": "demo",
        "group": "g-1",
        "index": 0,
        "task": "secret-3",
        "environment": "guess",
        "status": "done",
        "reward": 0.5,
        "chains": (chain(),),
    }
    return Rollout(**plain | changes)


def summary(**changes: Any) -> RolloutSummary:
    plain: dict[str, Any] = {
        "id": "r-1",
        "run": "demo",
        "group": "g-1",
        "task": "secret-3",
        "environment": "guess",
        "status": "done",
        "reward": 0.5,
        "success": True,
        "version_min": "3@1",
        "version_max": "4@1",
        "tokens": 1_234,
        "created_at": NOW - 125,
    }
    return RolloutSummary(**plain | changes)


def service(**changes: Any) -> ServiceStatus:
    plain: dict[str, Any] = {"boot_id": "b1", "started_at": NOW - 60, "environments": ("guess",), "runs": ()}
    return ServiceStatus(**plain | changes)


@pytest.mark.unit
def test_hostile_text_stays_text_everywhere() -> None:
    item = rollout(
        task=HOSTILE,
        environment=HOSTILE,
        messages=(Message(role="user", content=HOSTILE), Message(role="assistant", content=HOSTILE)),
        findings=(HOSTILE,),
        rewards={HOSTILE: 1.0},
        seconds={HOSTILE: 1.0},
    )
    run = RunInfo(name="demo", environment=HOSTILE, purpose=HOSTILE, last_error=HOSTILE)
    pieces = {
        render.rollout(item, NOW): 7,
        render.table(RolloutPage(total=1, rollouts=(summary(task=HOSTILE, environment=HOSTILE),)), "", NOW): 1,
        render.strip(service(boot_id=HOSTILE, environments=(HOSTILE,), runs=(run,)), NOW): 5,
        render.notice(HOSTILE, HOSTILE): 2,
    }
    for html, times in pieces.items():
        seen = Seen(html)
        assert seen.text.count(HOSTILE) == times
        assert not {"script", "img"} & set(seen.tags)
        assert not [name for name, _ in seen.attributes if name.startswith("on")]
        assert seen.open == []


@pytest.mark.unit
def test_an_unknown_reward_is_none_and_never_zero() -> None:
    unknown = rollout(reward=None, status="env_error", success=None)
    html = render.rollout(unknown, NOW)
    assert "reward none –" in Seen(html).text
    assert "not usable" in html
    row = Seen(render.table(RolloutPage(total=1, rollouts=(summary(reward=None, success=None),)), "", NOW))
    assert "donenone–3@1 – 4@1" in row.text
    zero = Seen(render.table(RolloutPage(total=1, rollouts=(summary(reward=0.0, success=False),)), "", NOW))
    assert "done0✗3@1 – 4@1" in zero.text


@pytest.mark.unit
def test_an_empty_rollout_says_so() -> None:
    empty = rollout(chains=(), messages=(), reward=None, status="timeout")
    assert "holds no messages" in render.rollout(empty, NOW)
    assert "has no chain" in render.tokens(empty, "mask")
    assert 'data-testid="bars"' not in render.rollout(empty, NOW)
    assert "none" in Seen(render.rollout(empty, NOW)).text


@pytest.mark.unit
def test_messages_are_bubbles_with_their_turn() -> None:
    talk = [("system", "be brief"), ("user", "guess 1-7"), ("assistant", "4"), ("tool", "low"), ("assistant", "")]
    messages = tuple(Message.model_validate({"role": role, "content": text}) for role, text in talk)
    seen = Seen(render.rollout(rollout(messages=messages), NOW))
    assert seen.all("data-testid").count("message") == 5
    for part in ("systembe brief", "userguess 1-7", "assistant · turn 14", "toollow", "assistant · turn 2empty"):
        assert part in seen.text


@pytest.mark.unit
def test_tokens_by_mask_logprob_and_version() -> None:
    spans = (VersionSpan(version="3@1", start=1, end=3), VersionSpan(version="4@1", start=3, end=4))
    mixed = Chain(ids=(9, 10, 11, 12), mask=(0, 1, 1, 1), logprobs=(0.0, -0.05, -3.0, -9.0), weight_versions=spans)
    item = rollout(chains=(mixed,))

    def kinds(colouring: render.Colouring) -> list[str]:
        return re.findall(r'<span class="dw-t ([\w-]+)" title', render.tokens(item, colouring))

    assert kinds("mask") == ["dw-c", "dw-m", "dw-m", "dw-m"]
    assert kinds("logprob") == ["dw-c", "dw-p0", "dw-p3", "dw-p4"]
    assert kinds("version") == ["dw-c", "dw-v0", "dw-v0", "dw-v1"]
    seen = Seen(render.tokens(item, "version"))
    assert seen.all("title") == [
        "position 0 · id 9 · context",
        "position 1 · id 10 · logprob -0.0500 (p 0.951) · version 3@1",
        "position 2 · id 11 · logprob -3.0000 (p 0.050) · version 3@1",
        "position 3 · id 12 · logprob -9.0000 (p 0.000) · version 4@1",
    ]
    assert "context3@14@1" in seen.text
    assert "contexttrained" in Seen(render.tokens(item, "mask")).text
    assert "p < 0.01" in Seen(render.tokens(item, "logprob")).text


@pytest.mark.unit
def test_more_versions_than_hues_and_logprobs_above_zero() -> None:
    spans = tuple(VersionSpan(version=f"{i}@1", start=i, end=i + 1) for i in range(12))
    many = Chain(ids=tuple(range(12)), mask=(1,) * 12, logprobs=(1e-6,) * 12, weight_versions=spans)
    html = render.tokens(rollout(chains=(many,)), "version")
    assert 'dw-v0" title="position 8 ' in html
    assert "p 1.000" in html
    assert "dw-p0" in render.tokens(rollout(chains=(many,)), "logprob")


@pytest.mark.unit
def test_forks_are_marked_where_they_leave_the_first_chain() -> None:
    html = render.tokens(rollout(chains=(chain((1, 2, 3, 4)), chain((1, 2, 9, 9, 9)), chain((1, 2)))), "mask")
    assert "chain 2 of 3 · 5 tokens, 2 trained · forks from chain 1 at position 2" in html
    assert "forks from chain 1 at position 2</p>" in html
    assert html.count("dw-fork") == 1
    assert 'dw-fork" title="position 2 · id 9' in html


@pytest.mark.unit
def test_long_chains_and_messages_are_cut_and_say_so() -> None:
    long = chain(tuple(range(render.TOKENS_SHOWN - 10)), sampled=100)
    html = render.tokens(rollout(chains=(long, long, long)), "mask")
    assert html.count('title="position') == render.TOKENS_SHOWN
    assert f"first {render.TOKENS_SHOWN:,} of {3 * (render.TOKENS_SHOWN - 10):,} tokens" in html
    text = Message(role="assistant", content="<" * (render.MESSAGE_SHOWN + 7))
    talk = render.rollout(rollout(messages=(text,)), NOW)
    assert talk.count("&lt;") == render.MESSAGE_SHOWN
    assert "7 more characters" in talk
    assert "more characters" not in render.rollout(rollout(messages=(Message(role="user", content="a"),)), NOW)


@pytest.mark.unit
def test_rows_link_to_their_rollouts_and_mark_the_chosen_one() -> None:
    page = RolloutPage(total=2, rollouts=(summary(id="r-2"), summary(id="r-1")))
    html = render.table(page, "r-1", NOW)
    assert Seen(html).all("href") == ["?rollout=r-2", "?rollout=r-1"]
    assert 'data-rollout="r-1" aria-current="true"' in html
    assert html.count("aria-current") == 1
    assert "2 min" in html
    assert "1,234" in html
    assert "No rollouts here" in render.table(RolloutPage(total=0, rollouts=()), "", NOW)


@pytest.mark.unit
def test_strip_shows_runs_and_pressure_and_what_to_do_without_runs() -> None:
    run = RunInfo(name="demo", environment="guess", purpose="training", groups_started=12_345, curriculum="4@1")
    text = Seen(render.strip(service(runs=(run,), backpressure=True, stage_active={"run": 3}), NOW)).text
    for part in ("demo", "started12,345", "dropped0", "curriculum4@1", "backpressure", "run3 · 0 s", "up 1 min"):
        assert part in text
    assert "POST /v1/runs" in render.strip(service(), NOW)
    assert "flowing" in render.strip(service(), NOW)


@pytest.mark.unit
@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0 s"), (59.9, "59 s"), (60, "1 min"), (7_200, "2 h"), (200_000, "2 d"), (-5, "0 s")]
)
def test_age(seconds: float, text: str) -> None:
    assert render.age(NOW - seconds, NOW) == text
    assert render.age(0.0, NOW) == "–"


@pytest.mark.unit
def test_versions() -> None:
    assert render.versions(None, None) == "none"
    assert render.versions("3@1", "3@1") == "3@1"
    assert render.versions("3@1", "4@1") == "3@1 – 4@1"


class Fake(BaseHTTPRequestHandler):
    """Answers by the last part of the path."""

    def do_GET(self) -> None:
        answers = {
            "refused": (404, json.dumps({"error": {"code": "unknown_rollout", "message": "not stored here"}})),
            "broken": (500, "<h1>Internal Server Error</h1>"),
            "shape": (200, "{}"),
            "good": (200, rollout(id="good").model_dump_json()),
        }
        status, body = answers[self.path.rpartition("/")[2]]
        self.send_response(status if self.headers["authorization"] == "Bearer secret" else 401)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
        """Be quiet."""


@contextmanager
def fake_service() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Fake)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.integration
def test_reader_says_what_a_bad_service_answered() -> None:
    expected: dict[str, tuple[type[DeltawireError], str]] = {
        "refused": (InvalidRequest, "answered 404: not stored here"),
        "broken": (PeerUnavailable, "answered 500: <h1>Internal"),
        "shape": (RejectError, "something else than a Rollout"),
        "../../etc": (InvalidRequest, "cannot be a rollout id"),
        "": (InvalidRequest, "cannot be a rollout id"),
    }
    with fake_service() as url:
        reader = Reader(url, "secret")
        assert asyncio.run(reader.rollout("good")).id == "good"
        for name, (kind, text) in expected.items():
            with pytest.raises(kind) as caught:
                asyncio.run(reader.rollout(name))
            assert text in str(caught.value)


@pytest.mark.integration
def test_reader_names_a_service_that_is_gone_or_hangs() -> None:
    with bind("127.0.0.1", 0) as silent:  # accepts connections, never answers
        url = url_of(silent)
        with pytest.raises(PeerUnavailable, match=re.escape(url)):
            asyncio.run(Reader(url, "secret", timeout=0.2).status())
    with pytest.raises(PeerUnavailable, match="ConnectError"):
        asyncio.run(Reader(url, "secret").recent("", "", 0, 50))
