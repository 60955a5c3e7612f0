"""The gateway over real HTTP: sessions, chains that hold exactly what the engine saw, refusals, and who may do what."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import openai
import pytest
from support.space import KEY, TOKEN, Space
from support_tiny import assert_close_to, make_checkpoint, publishing, reference, state_of, wait_until

from inference_space.gateway.sessions import SessionLimits
from sync import MemoryStore, Stamp
from sync.asgi import Guard
from sync.schema.sessions import Session
from sync.session_keys import make_key, session_of

pytestmark = pytest.mark.integration
TASK = {"role": "user", "content": "Guess a number between 1 and 99."}
LIMITS = SessionLimits(most=40, idle_seconds=3600, calls=24, tokens=20_000)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoints") / "one", 0)


@pytest.fixture(scope="module")
def space(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Space]:
    with ExitStack() as stack:
        store = MemoryStore()
        stack.enter_context(publishing(store, checkpoint))
        space = Space(
            stack, store, tmp_path_factory.mktemp("mirror"), max_len=512, max_body_bytes=1 << 20, sessions=LIMITS
        )
        wait_until(lambda: space.http.get("/ready").status_code == 200)
        yield space


@pytest.fixture
def session(space: Space) -> Iterator[Agent]:
    agent = Agent(space)
    yield agent
    space.http.delete(f"/v1/sessions/{agent.name}")


class Agent:
    """What an agent program has: a base URL with its key in the path, and nothing else."""

    def __init__(self, space: Space, **request: Any) -> None:
        key = space.open(**request)
        self.name, self.key, self.space = key.id, key.key, space
        self.http = space.stack.enter_context(httpx.Client(base_url=space.url + key.path, timeout=60))

    def chat(self, *messages: dict[str, Any], **more: Any) -> dict[str, Any]:
        answer = self.http.post("/v1/chat/completions", json={"model": "m", "messages": list(messages), **more})
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def trace(self) -> Session:
        return self.space.session(self.name)


def echo(answer: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": answer["choices"][0]["message"]["content"]}


def assert_exact(session: Session, checkpoint: Path, temperature: float = 1.0) -> None:
    """Chains hold exactly the recorded ids, and every trained token's logprob is that of teacher forcing."""
    calls = {call.id: call for call in session.calls}
    assert session.chains
    for chain in session.chains:
        last = calls[chain.calls[-1]]
        assert chain.chain.ids == last.prompt_ids + last.output_ids
        assert sum(chain.chain.mask) == sum(len(calls[name].output_ids) for name in chain.calls)
        forced = [0.0, *reference(checkpoint, list(chain.chain.ids), 1, temperature)]
        wanted = [logprob * mask for logprob, mask in zip(forced, chain.chain.mask, strict=True)]
        assert_close_to(chain.chain.logprobs, wanted)


@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_of_each_dialect_is_one_exact_chain(space: Space, checkpoint: Path, stream: bool) -> None:
    agent = Agent(space)
    with openai.OpenAI(base_url=f"{agent.http.base_url}v1", api_key="any", max_retries=0, timeout=60) as client:
        chat: list[Any] = [{"role": "system", "content": "Play."}, TASK]
        for _ in range(3):
            chat += [
                {"role": "assistant", "content": _chat(client, chat, stream)},
                {"role": "user", "content": "higher"},
            ]
        items: list[Any] = [{"role": "user", "content": "lower"}]
        for _ in range(3):
            items += [*_responses(client, items, stream), {"role": "user", "content": "higher"}]
        blocks: list[Any] = [{"role": "user", "content": "42"}]
        for _ in range(3):
            blocks += [
                {"role": "assistant", "content": _messages(agent, blocks, stream)},
                {"role": "user", "content": "?"},
            ]
    found = agent.trace()
    forks = [(len(chain.calls), chain.fork) for chain in found.chains]
    assert forks == [(3, ""), (3, "history_differs"), (3, "history_differs")]
    assert [call.dialect for call in found.calls] == ["chat"] * 3 + ["responses"] * 3 + ["messages"] * 3
    assert all(call.delivered for call in found.calls)
    assert_exact(found, checkpoint)


def _chat(client: openai.OpenAI, messages: list[Any], stream: bool) -> str:
    if not stream:
        answer = client.chat.completions.create(model="m", messages=messages, max_completion_tokens=6)
        return str(answer.choices[0].message.content)
    chunks = client.chat.completions.create(model="m", messages=messages, max_completion_tokens=6, stream=True)
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def _responses(client: openai.OpenAI, items: list[Any], stream: bool) -> list[dict[str, Any]]:
    if not stream:
        found = client.responses.create(model="m", input=items, max_output_tokens=6)
    else:
        *_, last = client.responses.create(model="m", input=items, max_output_tokens=6, stream=True)
        assert last.type in ("response.completed", "response.incomplete")
        found = last.response
    return [item.model_dump(exclude_none=True) for item in found.output]


def _messages(agent: Agent, messages: list[Any], stream: bool) -> list[dict[str, Any]]:
    body = {"model": "m", "max_tokens": 6, "messages": messages, "stream": stream}
    answer = agent.http.post("/v1/messages?beta=true", json=body, headers={"x-api-key": "dummy"})
    assert answer.status_code == 200, answer.text
    if not stream:
        return list(answer.json()["content"])
    deltas = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]
    text = "".join(d["delta"]["text"] for d in deltas if d.get("delta", {}).get("type") == "text_delta")
    return [{"type": "text", "text": text}]


def test_the_runs_temperature_counts_and_what_was_asked_is_told(space: Space, checkpoint: Path) -> None:
    agent = Agent(space, temperature=0.5)
    first = agent.chat(TASK, temperature=0, seed=7, top_p=0.1, max_tokens=8, logit_bias={"5": 100})
    second = agent.chat(TASK, echo(first), {"role": "user", "content": "higher"}, temperature=0.5, max_tokens=8)
    found = agent.trace()
    assert found.calls[0].asked == {"temperature": 0, "seed": 7, "top_p": 0.1, "logit_bias": "{'5': 100}"}
    assert found.calls[1].asked == {}
    assert {call.sampling.temperature for call in found.calls} == {0.5}
    assert set(found.findings) == {"not_used:temperature", "not_used:seed", "not_used:top_p", "not_used:logit_bias"}
    assert second["usage"]["prompt_tokens"] == len(found.calls[1].prompt_ids)
    assert_exact(found, checkpoint, 0.5)


def test_an_evaluation_samples_as_the_agent_asks(space: Space) -> None:
    agent = Agent(space, purpose="evaluation", temperature=0.0)
    texts = {echo(agent.chat(TASK, temperature=1, seed=3, max_tokens=8))["content"] for _ in range(3)}
    assert len(texts) == 1
    named, default = agent.trace().calls[0].sampling, None
    agent.chat(TASK, max_tokens=2)
    default = agent.trace().calls[-1].sampling
    assert (named.temperature, named.seed, default.temperature, default.seed) == (1.0, 3, 0.0, None)


def test_an_edited_turn_forks_and_trains_nothing_twice(session: Agent, checkpoint: Path) -> None:
    first = session.chat(TASK, max_tokens=6)
    session.chat(TASK, echo(first), {"role": "user", "content": "higher"}, max_tokens=6)
    session.chat(
        TASK, {"role": "assistant", "content": "I said 12."}, {"role": "user", "content": "lower"}, max_tokens=6
    )
    session.chat(TASK, echo(first), {"role": "user", "content": "lower"}, max_tokens=6)
    found = session.trace()
    assert [(len(c.calls), c.fork) for c in found.chains] == [(2, ""), (1, "echo_differs"), (1, "branch")]
    assert found.chains[1].fork_at is not None
    assert found.calls[3].parent == found.calls[0].id
    trained = [sum(chain.chain.mask) for chain in found.chains]
    sizes = [len(call.output_ids) for call in found.calls]
    assert trained == [sizes[0] + sizes[1], sizes[2], sizes[3]]
    assert_exact(found, checkpoint)


def test_a_stop_text_ends_the_output_and_stays_in_the_ids(space: Space, checkpoint: Path) -> None:
    agent = Agent(space)
    for _ in range(12):
        whole = echo(agent.chat(TASK, max_tokens=24))["content"]
        if len(whole) > 6:
            break
    stop = whole[3:5]
    seen = False
    for _ in range(8):
        answer = agent.chat(TASK, max_tokens=24, stop=[stop, "never said"])
        call = agent.trace().calls[-1]
        assert stop not in echo(answer)["content"]
        stopped = stop in agent.space.engine.tokenizer.decode(list(call.output_ids))
        assert not stopped or (call.finish_reason == "stop" and call.text == echo(answer)["content"])
        seen = seen or stopped
    assert_exact(agent.trace(), checkpoint)
    rest = agent.space.engine.tokenizer.decode(list(agent.trace().calls[-1].output_ids))
    assert isinstance(rest, str)


def test_side_calls_and_other_models_are_told_apart(session: Agent) -> None:
    tool = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}
    session.chat(TASK, tools=[tool], max_tokens=4)
    title = session.chat({"role": "user", "content": "A title?"}, model="small", max_tokens=4)
    session.chat({"role": "system", "content": "You are a helper."}, TASK, tools=[tool], max_tokens=4)
    assert title["model"] == "small"
    found = session.trace()
    assert [call.role for call in found.calls] == ["main", "side", "subagent"]
    masks = {chain.role: sum(chain.chain.mask) for chain in found.chains}
    assert masks["side"] == 0
    assert masks["main"] > 0
    assert masks["subagent"] > 0
    assert found.calls[0].findings == ("tools_not_shown",)


CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
BAD = [
    (CHAT, {"messages": [TASK], "n": 2}, 400),
    (CHAT, {"messages": []}, 400),
    (CHAT, {"messages": "x"}, 400),
    (CHAT, {"messages": [TASK], "tools": [{"type": "function", "function": {"name": 7}}]}, 400),
    (CHAT, {"messages": [TASK], "response_format": {"type": "json_object"}}, 400),
    (CHAT, {"messages": [{"role": "user", "content": "x " * 800}]}, 400),
    (CHAT, {"messages": [TASK], "max_tokens": 0}, 400),
    (CHAT, {"messages": [TASK], "temperature": -1}, 400),
    (RESPONSES, {"input": {"a": 1}}, 400),
    (RESPONSES, {"input": "x", "previous_response_id": "resp_1"}, 400),
    (RESPONSES, {"input": "x " * 800}, 400),
    (MESSAGES, {"messages": [{"role": "user", "content": 7}], "max_tokens": 5}, 400),
    (MESSAGES, {"messages": [TASK], "max_tokens": 5, "tools": [{"name": "bash", "input_schema": 7}]}, 400),
    (MESSAGES, {"messages": [{"role": "user", "content": "x " * 800}], "max_tokens": 5}, 400),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body", "status"), BAD)
def test_what_cannot_be_answered_is_refused_in_the_dialects_shape(
    session: Agent, path: str, body: dict[str, Any], status: int, stream: bool
) -> None:
    answer = session.http.post(path, json={"model": "m", "stream": stream, **body})
    assert answer.status_code == status, answer.text
    assert_shape(path, answer.json())
    assert session.trace().calls == ()
    assert session.chat(TASK, max_tokens=2)["choices"]


def assert_shape(path: str, body: dict[str, Any]) -> None:
    assert isinstance(body["error"]["message"], str)
    assert body["error"]["type"]
    if path.startswith(MESSAGES):
        assert body["type"] == "error"
    else:
        assert {"param", "code"} <= body["error"].keys()


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b"null", b'{"messages":' + b"[" * 100_000, b"\xff\xfe", b'{"a":1e999}']
)
@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES, "/v1/messages/count_tokens"])
def test_bytes_that_are_no_request_are_refused(session: Agent, path: str, data: bytes) -> None:
    answer = session.http.post(path, content=data)
    assert answer.status_code == 400, answer.text
    assert_shape(path, answer.json())


def test_an_over_long_prompt_has_the_codes_that_agents_look_for(session: Agent) -> None:
    long = {"role": "user", "content": "x " * 800}
    chat = session.http.post(CHAT, json={"model": "m", "messages": [long]}).json()
    assert chat["error"]["code"] == "context_length_exceeded"
    messages = session.http.post(MESSAGES, json={"model": "m", "max_tokens": 5, "messages": [long]}).json()
    assert messages["error"]["type"] == "invalid_request_error"
    assert re.match("prompt is too long", messages["error"]["message"])


def test_tokens_are_counted_as_they_are_used(session: Agent) -> None:
    body = {"model": "m", "messages": [TASK], "system": "Play."}
    counted = session.http.post("/v1/messages/count_tokens", json=body).json()["input_tokens"]
    used = session.http.post(MESSAGES, json={**body, "max_tokens": 3}).json()["usage"]["input_tokens"]
    assert counted == used == len(session.trace().calls[0].prompt_ids)


def test_a_client_that_goes_away_ends_its_call_and_no_other(space: Space, checkpoint: Path) -> None:
    agent, other = Agent(space), Agent(space)
    space.engine.pause()
    try:
        with ThreadPoolExecutor(1) as pool:
            kept = pool.submit(other.chat, TASK, max_tokens=4)
            for stream in (False, True):
                with pytest.raises(httpx.ReadTimeout):
                    agent.http.post(CHAT, json={"model": "m", "messages": [TASK], "stream": stream}, timeout=0.5)
            wait_until(lambda: space.session(agent.name).active == 0)
            space.engine.resume()
            assert kept.result(60)["choices"]
    finally:
        if space.engine._scheduler.paused:
            space.engine.resume()
    found = agent.trace()
    assert (found.calls, found.findings) == ((), {"client_gone": 2})
    assert_exact(other.trace(), checkpoint)


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_of_a_deleted_session_ends_with_it(space: Space, stream: bool) -> None:
    agent = Agent(space)
    space.engine.pause()
    try:
        with ThreadPoolExecutor(1) as pool:
            body = {"model": "m", "messages": [TASK], "stream": stream}
            waiting = pool.submit(agent.http.post, CHAT, json=body)
            wait_until(lambda: space.session(agent.name).active == 1)
            assert space.http.delete(f"/v1/sessions/{agent.name}").status_code == 204
            answer = waiting.result(60)
    finally:
        space.engine.resume()
    assert answer.status_code == 404
    assert "is not open" in answer.json()["error"]["message"]


def test_a_stream_that_waits_is_kept_alive(checkpoint: Path, tmp_path: Path) -> None:
    store = MemoryStore()
    with ExitStack() as stack:
        stack.enter_context(publishing(store, checkpoint))
        space = Space(stack, store, tmp_path / "mirror", ping_seconds=0.2)
        wait_until(lambda: space.http.get("/ready").status_code == 200)
        for path, ping in ((CHAT, ": ping"), (RESPONSES, ": ping"), (MESSAGES, "event: ping")):
            agent = Agent(space)
            body = {"model": "m", "stream": True, "max_tokens": 4, "messages": [TASK], "input": "x"}
            space.engine.pause()
            seen: list[str] = []
            with agent.http.stream("POST", path, json=body) as answer:
                assert answer.status_code == 200
                for line in answer.iter_lines():
                    seen.append(line)
                    if line == ping and seen.count(ping) == 2:
                        space.engine.resume()
            assert seen.count(ping) >= 2
            (call,) = agent.trace().calls
            assert call.delivered


def test_limits_of_sessions_are_answers_of_their_own(space: Space) -> None:
    opened = []
    while (answer := space.http.post("/v1/sessions", json={})).status_code == 200:
        opened.append(answer.json()["id"])
        assert len(opened) <= LIMITS.most
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "overloaded")
    for name in opened:
        assert space.http.delete(f"/v1/sessions/{name}").status_code == 204
    agent = Agent(space, id="busy")
    for _ in range(LIMITS.calls):
        agent.chat(TASK, max_tokens=1)
    refused = agent.http.post(CHAT, json={"model": "m", "messages": [TASK]})
    assert (refused.status_code, refused.json()["error"]["type"]) == (429, "rate_limit_error")
    assert "max_session_calls" in refused.json()["error"]["message"]
    again = space.http.post("/v1/sessions", json={"id": "busy"})
    assert again.json()["key"] == agent.key
    assert space.http.post("/v1/sessions", json={"id": "busy", "temperature": 0.5}).status_code == 409
    assert space.http.delete("/v1/sessions/busy").status_code == 204
    gone = agent.http.post(CHAT, json={"model": "m", "messages": [TASK]})
    assert (gone.status_code, space.http.get("/v1/sessions/busy").status_code) == (404, 404)


@pytest.mark.parametrize(
    "body", [{"id": "../x"}, {"temperature": -1}, {"purpose": "fun"}, {"extra": 1}, {"train": ["x"]}]
)
def test_a_session_that_makes_no_sense_is_refused(space: Space, body: dict[str, Any]) -> None:
    answer = space.http.post("/v1/sessions", json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_request")


def test_many_sessions_during_updates_stay_exact(checkpoint: Path, tmp_path: Path) -> None:
    other = make_checkpoint(tmp_path / "two", 1)
    versions = {"0@1": checkpoint}
    store = MemoryStore()
    with ExitStack() as stack:
        publisher = stack.enter_context(publishing(store, checkpoint))
        space = Space(stack, store, tmp_path / "mirror", max_len=256, max_queued=256)
        wait_until(lambda: space.http.get("/ready").status_code == 200)
        pool = stack.enter_context(ThreadPoolExecutor(16))
        begun, moved = Event(), Event()  # calls before and after an update, however slow the disk is

        def converse(_: int) -> Session:
            agent, messages = Agent(space), [TASK]
            for turn in range(4):
                assert turn < 2 or moved.wait(120)
                messages += [echo(agent.chat(*messages, max_tokens=12)), {"role": "user", "content": "higher"}]
                begun.set()
            return agent.trace()

        running = [pool.submit(converse, number) for number in range(32)]
        assert begun.wait(120)
        for step in range(1, 6):
            source = other if step % 2 else checkpoint
            publisher.flush(state_of(source), Stamp(step=step, sync=step))
            versions[f"{step}@1"] = source
            space.http.post("/sync/poke")
            wait_until(lambda step=step: space.status().version == f"{step}@1")  # type: ignore[misc]
            moved.set()
        sessions = [task.result(120) for task in running]
    seen = set()
    for found in sessions:
        (chain,) = found.chains
        assert len(chain.calls) == 4
        for span in chain.chain.weight_versions:
            seen.add(span.version)
            forced = reference(versions[span.version], list(chain.chain.ids[: span.end]), 1)
            assert_close_to(chain.chain.logprobs[span.start : span.end], forced[span.start - 1 :])
    assert len(seen) > 1


def routes_of(space: Space) -> list[tuple[str, str]]:
    assert isinstance(space.app, Guard)
    fastapi: Any = space.app._app
    return [
        (method, re.sub(r"\{[^}]*\}", "x", route.path)) for route in fastapi.routes for method in sorted(route.methods)
    ]


OPEN = {("GET", "/health"), ("HEAD", "/health")}
AGENTS = {CHAT, RESPONSES, MESSAGES, "/v1/messages/count_tokens", "/v1/models", "/v1/models/x", "/"}


def test_every_route_answers_only_whom_it_should(space: Space) -> None:
    routes = routes_of(space)
    assert len(routes) > 16
    routes += [("GET", "/nowhere"), ("POST", "/pause"), ("POST", "/collective_rpc"), ("GET", "/")]
    routes += [("GET", path) for path in ("/docs", "/openapi.json", "/v1/sessions/", "/v1/%2e%2e/sync/status")]
    key = space.open(id="scan").key
    wrong = [
        "none",
        "wrong",
        TOKEN[:-1],
        TOKEN + "x",
        key[:-1],
        key + "0",
        "scan." + "0" * 40,
        "other" + key[4:],
        make_key("t", "scan"),
    ]
    plain = space.stack.enter_context(httpx.Client(timeout=60))
    for method, path in routes:
        for bad in wrong:
            for headers, prefix in (
                ({"Authorization": f"Bearer {bad}"}, ""),
                ({"x-api-key": bad}, ""),
                ({}, f"/s/{bad}"),
            ):
                answer = plain.request(method, space.url + prefix + path, headers=headers)
                if (method, path) in OPEN:
                    assert answer.status_code == 200
                else:
                    assert answer.status_code == 401, (method, path, bad)
                assert TOKEN not in answer.text
        if (method, path) in OPEN:
            continue
        with_key = plain.request(method, space.url + path, headers={"x-api-key": key}, json={})
        in_path = plain.request(
            method, f"{space.url}/s/{key}{path}", json={}, headers={"Authorization": "Bearer dummy"}
        )
        allowed = path in AGENTS
        assert (with_key.status_code == 403) != allowed, (method, path, with_key.status_code)
        assert (in_path.status_code == 403) != allowed, (method, path, in_path.status_code)
        if (method, path) not in (("DELETE", "/v1/sessions/x"), ("POST", "/sync/poke")):
            answer = plain.request(method, space.url + path, headers=KEY, json={})
            assert answer.status_code not in (401, 403), (method, path)


def test_keys_are_of_one_token_and_one_name() -> None:
    key = make_key(TOKEN, "a.b")
    assert session_of(TOKEN, key) == "a.b"
    assert session_of("another-token-of-sixteen", key) is None
    for bad in ("", ".", "a.b", "a.b.", key.replace("a.b", "a.c"), key.upper(), key + "\n", "é" + key):
        assert session_of(TOKEN, bad) is None


def test_models_are_listed_for_both_sdks(space: Space, session: Agent) -> None:
    (model,) = session.http.get("/v1/models").json()["data"]
    assert (model["id"], model["max_model_len"], model["type"], model["object"]) == ("policy", 512, "model", "model")
    assert session.http.get("/v1/models/any/thing").json()["id"] == "any/thing"
    assert space.http.get("/v1/models/policy").json()["id"] == "policy"
    missing = space.http.get("/v1/models/gpt-4")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")
    other = space.http.post(CHAT, json={"model": "gpt-4", "messages": [TASK]})
    assert (other.status_code, other.json()["error"]["code"]) == (404, "model_not_found")
    assert session.http.head("/").status_code == 200


def test_completions_take_ids_and_give_ids_as_trls_worker_wants_them(space: Space, checkpoint: Path) -> None:
    ids = [5, 6, 7, 8]
    body = {
        "model": "policy", "prompt": ids, "max_tokens": 6, "temperature": 1.0, "top_p": 1.0, "top_k": 0,
        "repetition_penalty": 1.0, "n": 1, "return_token_ids": True, "logprobs": 0, "seed": 2**62,
    }  # fmt: skip
    answer = space.http.post("/v1/completions", json=body).json()
    choice = answer["choices"][0]
    assert choice["prompt_token_ids"] == ids
    assert_close_to(choice["logprobs"]["token_logprobs"], reference(checkpoint, ids + choice["token_ids"], 4))
    assert choice["weight_versions"][-1] == {"version": "0@1", "start": 0, "end": len(choice["token_ids"])}
    assert answer["usage"]["completion_tokens"] == len(choice["token_ids"])
    both = space.http.post("/v1/completions", json={"prompt": [ids, [9, 10]], "max_tokens": 2, "stream": False}).json()
    assert [c["index"] for c in both["choices"]] == [0, 1]
    with openai.OpenAI(base_url=space.url + "/v1", api_key=TOKEN, max_retries=0, timeout=60) as client:
        text = client.completions.create(model="policy", prompt="Guess a number", max_tokens=3, logprobs=0)
        assert text.choices[0].logprobs is not None
        pieces = list(client.completions.create(model="policy", prompt="Guess", max_tokens=3, stream=True))
        assert pieces[-1].usage is not None
    for name, value, status in (
        ("n", 2, 400), ("top_p", 0.5, 400), ("logprobs", 3, 400), ("prompt", [999_999], 400), ("prompt", [], 400),
        ("prompt", list(range(3, 300)) * 2, 400), ("stop", [""], 400), ("guided_json", {}, 400), ("model", "x", 404),
    ):  # fmt: skip
        refused = space.http.post("/v1/completions", json={"prompt": [5], name: value})
        assert refused.status_code == status, (name, refused.text)
        assert_shape("/v1/completions", refused.json())


def test_metrics_tell_what_the_status_tells(space: Space) -> None:
    Agent(space).chat(TASK, max_tokens=2)
    answer = space.http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    lines = dict(line.rsplit(" ", 1) for line in answer.text.splitlines() if not line.startswith("#"))
    status = space.status()
    assert float(lines["deltawire_ready"]) == 1
    assert float(lines["deltawire_lag"]) == 0
    assert float(lines["deltawire_engine_output_tokens_total"]) == status.engine["output_tokens"]
    assert float(lines["deltawire_session_calls_total"]) >= 1
    assert lines[f'deltawire_info{{version="0@1",head="0@1",channel_uid="{status.channel_uid}"}}'] == "1"
    names = re.findall(r"^# TYPE (\S+) (gauge|counter)$", answer.text, re.MULTILINE)
    assert len(names) == len(lines) == len(set(names))
