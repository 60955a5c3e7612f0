"""The inference Space over real HTTP: following a real bucket, calls, scores, OpenAI's client, refusals, shutdown."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest
import torch
from support.space import KEY, TOKEN, Space
from support_tiny import make_checkpoint, publishing, reference, state_of, wait_until

from inference_space.engines.base import Call
from sync import Identity, MemoryStore, Stamp, open_store
from sync.chains import ChainBuilder
from sync.schema.calls import (
    MAX_CALLS,
    GenerateCall,
    GenerateRequest,
    GenerateResponse,
    Message,
    Sampling,
    ScoreResponse,
)

pytestmark = pytest.mark.integration
USER = Message(role="user", content="Guess a number between 1 and 99.")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    return make_checkpoint(root / "one", 0), make_checkpoint(root / "two", 1)


@pytest.fixture(scope="module")
def space(checkpoints: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Space]:
    with ExitStack() as stack:
        store = MemoryStore()
        stack.enter_context(publishing(store, checkpoints[0]))
        space = Space(stack, store, tmp_path_factory.mktemp("mirror"), max_body_bytes=1 << 20)
        wait_until(lambda: space.http.get("/ready").status_code == 200)
        yield space


def test_a_chain_of_calls_is_one_chain_of_exact_tokens(space: Space, checkpoints: tuple[Path, Path]) -> None:
    builder, message = ChainBuilder(), USER
    prefix: tuple[int, ...] = ()
    for turn in range(4):
        sampling = Sampling(max_tokens=6, seed=turn)
        call = GenerateCall(id=f"c{turn}", prefix_ids=prefix, messages=(message,), sampling=sampling)
        result = space.generate(call)[0]
        assert result.error is None
        builder.append(result)
        prefix, message = result.prompt_ids + result.output_ids, Message(role="user", content="higher")
    (chain,) = builder.chains()
    wanted = [0.0, *reference(checkpoints[0], list(chain.ids), 1)]
    for mask, found, want in zip(chain.mask, chain.logprobs, wanted, strict=True):
        assert abs(found - want * mask) < 1e-4


def test_one_bad_call_fails_alone(space: Space) -> None:
    unknown = GenerateCall(id="unknown", prefix_ids=(5, 999_999))
    long = GenerateCall(id="long", prefix_ids=(5,) * 128)
    empty = GenerateCall(id="empty")
    good = GenerateCall(id="good", messages=(USER,), sampling=Sampling(max_tokens=3, seed=1))
    results = {r.id: r for r in space.generate(unknown, long, good, empty)}
    codes = {r.id: r.error.code for r in results.values() if r.error}
    assert codes == {"unknown": "unknown_token", "long": "prompt_too_long", "empty": "empty_prompt"}
    found = results["good"]
    assert found.finish_reason in ("stop", "length")
    assert found.weight_versions[0].version == "0@1"
    tokenizer = space.engine.tokenizer
    shown = found.output_ids[:-1] if found.finish_reason == "stop" else found.output_ids
    assert found.text == tokenizer.decode(list(shown))
    assert space.generate(good)[0] == found


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/generate", "{", "JSON"),
        ("/v1/generate", "[]", "body"),
        ("/v1/generate", '{"calls": []}', "calls"),
        ("/v1/generate", '{"calls": [{"id": "a", "prompt": "x"}]}', "calls.0.prompt"),
        ("/v1/generate", '{"calls": [{"id": "a", "sampling": {"max_tokens": 0}}]}', "calls.0.sampling.max_tokens"),
        ("/v1/generate", '{"calls": [{"id": "a", "prefix_ids": [-1]}]}', "calls.0.prefix_ids.0"),
        ("/v1/generate", json.dumps({"calls": [{"id": "a"}] * (MAX_CALLS + 1)}), "calls"),
        ("/v1/score", '{"sequences": [{"ids": [1]}]}', "sequences.0.ids"),
        ("/v1/score", '{"sequences": [{"ids": [1, 2]}], "temperature": 0}', "temperature"),
        ("/v1/score", '{"sequences": [{"ids": [1, 2]}], "temperature": 1e-40}', "temperature"),
        (
            "/v1/generate",
            '{"calls": [{"id": "a", "prefix_ids": [5], "sampling": {"temperature": 1e-40}}]}',
            "temperature",
        ),
        ("/v1/score", '{"sequences": [{"ids": [1, 999999]}]}', "sequences.0"),
        ("/v1/chat/completions", '{"messages": "hello"}', "messages"),
    ],
)
def test_a_malformed_body_is_refused_naming_the_field(space: Space, path: str, body: str, field: str) -> None:
    answer = space.http.post(path, content=body)
    assert answer.status_code == 400
    assert field in answer.json()["error"]["message"]


def test_a_body_beyond_the_limit_is_refused(space: Space) -> None:
    answer = space.http.post("/v1/generate", content=b" " * ((1 << 20) + 1))
    assert answer.status_code == 413
    assert "max_body_bytes" in answer.json()["error"]["message"]


def test_a_body_without_length_is_cut_off_at_the_limit(space: Space) -> None:
    answer = space.http.post("/v1/generate", content=iter([b" " * (1 << 16)] * 17))
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")


def test_unknown_routes_and_methods_answer_json(space: Space) -> None:
    assert space.http.get("/nowhere").json()["error"]["code"] == "not_found"
    answer = space.http.get("/v1/generate")
    assert (answer.status_code, answer.json()["error"]["code"]) == (405, "method_not_allowed")


def test_scores_come_with_their_version(space: Space, checkpoints: tuple[Path, Path]) -> None:
    body = {"sequences": [{"ids": [5, 6, 7, 8], "start": 2}, {"ids": [9, 10]}], "temperature": 1.0}
    scores = ScoreResponse.model_validate_json(space.http.post("/v1/score", json=body).content)
    assert scores.version == "0@1"
    assert np.allclose(scores.logprobs[0], reference(checkpoints[0], [5, 6, 7, 8], 2), atol=1e-4)
    assert np.allclose(scores.logprobs[1], reference(checkpoints[0], [9, 10], 1), atol=1e-4)


@pytest.fixture
def client(space: Space) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=space.url + "/v1", api_key=TOKEN, max_retries=0, timeout=60) as client:
        yield client


def test_the_openai_client_gets_a_completion(space: Space, client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="policy",
        messages=[{"role": "user", "content": [{"type": "text", "text": USER.content}]}],
        max_completion_tokens=5,
        seed=3,
        logprobs=True,
        n=1,
    )
    native = space.generate(GenerateCall(id="a", messages=(USER,), sampling=Sampling(max_tokens=5, seed=3)))[0]
    choice = answer.choices[0]
    assert choice.message.content == native.text
    assert choice.finish_reason == native.finish_reason
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert np.allclose([t.logprob for t in choice.logprobs.content], native.logprobs, atol=1e-5)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(native.prompt_ids)
    assert answer.usage.completion_tokens == len(native.output_ids)
    assert answer.model_extra is not None
    assert answer.model_extra["weight_version"] == "0@1"
    assert [m.id for m in client.models.list()] == ["policy"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 2),
        ("stop", 7),
        ("tools", [{"type": "function", "function": {}}]),
        ("top_p", 0.5),
        ("response_format", {"type": "json_object"}),
        ("repetition_penalty", 1.1),
    ],
)
def test_what_chat_cannot_honour_is_refused_by_name(client: openai.OpenAI, name: str, value: object) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            model="policy", messages=[{"role": "user", "content": "x"}], extra_body={name: value}
        )
    assert str(caught.value.param).partition(".")[0] == name
    assert caught.value.type == "invalid_request_error"


def test_an_over_long_chat_names_the_limit(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="max_len = 128"):
        client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "x " * 500}])


def test_a_new_version_is_served_after_a_poke(checkpoints: tuple[Path, Path], tmp_path: Path) -> None:
    one, two = checkpoints
    store = MemoryStore()
    with ExitStack() as stack:
        space = Space(stack, store, tmp_path / "mirror")
        answer = space.http.get("/ready")
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "not_ready"
        call = GenerateCall(id="a", messages=(USER,), sampling=Sampling(max_tokens=4, seed=1))
        body = GenerateRequest(calls=(call,)).model_dump_json()
        assert space.http.post("/v1/generate", content=body).status_code == 503
        publisher = stack.enter_context(publishing(store, one))
        assert space.http.post("/sync/poke").status_code == 200
        wait_until(lambda: space.http.get("/ready").status_code == 200)
        publisher.flush(state_of(two), Stamp(step=1, sync=1))
        space.http.post("/sync/poke")
        wait_until(lambda: space.status().version == "1@1")
        result = space.generate(call)[0]
        assert [s.version for s in result.weight_versions] == ["1@1"]
        ids = [*result.prompt_ids, *result.output_ids]
        assert np.allclose(result.logprobs, reference(two, ids, len(result.prompt_ids)), atol=1e-4)
        status = space.status()
        assert status.digest_failures == 0
        assert status.engine["output_tokens"] == len(result.output_ids)


def test_a_full_queue_and_a_passed_deadline(checkpoints: tuple[Path, Path], tmp_path: Path) -> None:
    store = MemoryStore()
    with ExitStack() as stack:
        stack.enter_context(publishing(store, checkpoints[0]))
        space = Space(stack, store, tmp_path / "mirror", request_seconds=0.5, max_queued=4)
        wait_until(lambda: space.http.get("/ready").status_code == 200)
        space.engine.pause()
        calls = tuple(GenerateCall(id=str(i), messages=(USER,)) for i in range(5))
        answer = space.http.post("/v1/generate", content=GenerateRequest(calls=calls).model_dump_json())
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "overloaded")
        late = space.generate(calls[0])[0]
        assert late.error is not None
        assert "request_seconds" in late.error.message
        chat = space.http.post("/v1/chat/completions", json={"messages": [USER.model_dump()]})
        assert (chat.status_code, chat.json()["error"]["code"]) == (504, "deadline")


def test_calls_of_a_lost_caller_are_cancelled(checkpoints: tuple[Path, Path], tmp_path: Path) -> None:
    store = MemoryStore()
    with ExitStack() as stack:
        stack.enter_context(publishing(store, checkpoints[0]))
        space = Space(stack, store, tmp_path / "mirror")
        wait_until(lambda: space.http.get("/ready").status_code == 200)
        space.engine.pause()
        with pytest.raises(httpx.ReadTimeout):
            space.http.post("/v1/chat/completions", json={"messages": [USER.model_dump()]}, timeout=0.5)
        waiting = space.engine._scheduler._waiting
        wait_until(lambda: len(waiting) == 1 and waiting[0].future.cancelled())
        space.engine.resume()
        assert space.engine.generate([Call([5], Sampling(max_tokens=1))])[0].result(60).output_ids
        assert space.engine.status()["output_tokens"] == 1


def test_a_dead_scheduler_shows_in_ready_and_in_answers(
    checkpoints: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> torch.Tensor:
        raise MemoryError("no room for this step")

    monkeypatch.setattr("inference_space.engines.forward.Passes.prefill", broken)
    store = MemoryStore()
    with ExitStack() as stack:
        stack.enter_context(publishing(store, checkpoints[0]))
        space = Space(stack, store, tmp_path / "mirror")
        wait_until(lambda: space.http.get("/ready").status_code == 200)
        result = space.generate(GenerateCall(id="a", messages=(USER,)))[0]
        assert result.error is not None
        assert result.error.code == "engine_failed"
        answer = space.http.get("/ready")
        assert answer.status_code == 503
        assert "no room for this step" in answer.json()["error"]["message"]
        assert not space.status().ready


RUNNER = (
    "import argparse\nfrom inference_space import cli\nparser = argparse.ArgumentParser()\n"
    "cli.add_arguments(parser)\nraise SystemExit(cli.run(parser.parse_args()))"
)


def command(*flags: object) -> list[str]:
    return [sys.executable, "-c", RUNNER, *map(str, flags)]


ENVIRON = {**os.environ, "DELTAWIRE_TOKEN": TOKEN, "OMP_NUM_THREADS": "1"}


@contextmanager
def process(tmp_path: Path, run: Path) -> Iterator[tuple[subprocess.Popen[str], httpx.Client]]:
    ready = tmp_path / "ready.json"
    ready.unlink(missing_ok=True)
    flags = ("--run", run, "--folder", tmp_path / "mirror", "--ready-file", ready, "--log", "json")
    with subprocess.Popen(command(*flags), env=ENVIRON, stderr=subprocess.PIPE, text=True) as child:
        try:
            wait_until(lambda: ready.exists() or child.poll() is not None)
            url = json.loads(ready.read_text())["url"]
            with httpx.Client(base_url=url, headers=KEY, timeout=60) as client:
                yield child, client
        finally:
            if child.poll() is None:
                child.kill()


def test_the_process_waits_for_weights_and_ends_cleanly(checkpoints: tuple[Path, Path], tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "run"), create=True, writable=True)
    with process(tmp_path, tmp_path / "run") as (child, client):
        assert client.get("/health").status_code == 200
        assert client.get("/ready").status_code == 503
        with publishing(store, checkpoints[0]) as publisher:
            assert publisher.identity == Identity(1, 0)
        client.post("/sync/poke")
        wait_until(lambda: client.get("/ready").status_code == 200)
        call = GenerateCall(id="a", messages=(USER,), sampling=Sampling(max_tokens=3))
        answer = client.post("/v1/generate", content=GenerateRequest(calls=(call,)).model_dump_json())
        assert GenerateResponse.model_validate_json(answer.content).calls[0].output_ids
        child.send_signal(signal.SIGTERM)
        assert child.stderr is not None
        lines = child.stderr.read().splitlines()
        assert child.wait(60) == 0
    events = [json.loads(line)["event"] for line in lines if line.startswith("{")]
    assert events[0] == "listening"
    assert events[-1] == "stopped"
    with process(tmp_path, tmp_path / "run") as (child, client):
        wait_until(lambda: client.get("/ready").status_code == 200)
        assert client.get("/sync/status").json()["bytes_fetched"] == 0
        child.send_signal(signal.SIGINT)
        assert child.wait(60) == 0


def test_settings_are_printed_and_wrong_ones_refused(tmp_path: Path) -> None:
    flags = ("--run", tmp_path, "--folder", tmp_path / "m", "--max-slots", 3)
    shown = subprocess.run(command(*flags, "--print-config"), env=ENVIRON, capture_output=True, text=True)
    assert shown.returncode == 0
    assert "max_slots = 3" in shown.stdout
    missing = {k: v for k, v in ENVIRON.items() if k != "DELTAWIRE_TOKEN"}
    refused = subprocess.run(command(*flags), env=missing, capture_output=True, text=True)
    assert "ConfigError: DELTAWIRE_TOKEN is not set" in refused.stderr
    for flag, value, why in (("--max-len", 1, "--max-len"), ("--ready-file", tmp_path / "no" / "r", "does not exist")):
        refused = subprocess.run(command(*flags, flag, value), env=ENVIRON, capture_output=True, text=True)
        assert why in refused.stderr
