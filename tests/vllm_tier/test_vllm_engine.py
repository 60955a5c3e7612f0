"""The vLLM engine under a real follower: bits, tokens and logprobs of every version, failures, limits, policies.

Needs vLLM's build for CPUs, which has an environment of its own: `make test-vllm`. Here vLLM runs in this process;
what it warns of while it is imported is not ours.
"""

from __future__ import annotations

import asyncio
import importlib.util
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed here; run make test-vllm", allow_module_level=True)

from support_tiny import (
    assert_close_to,
    make_checkpoint,
    prompts,
    publishing,
    reference,
    state_of,
    wait_until,
)
from vllm_live import KINDS, checkpoint, cut, edited, fresh, greedy, noise, same

from inference_space.app import create_app
from inference_space.engines.base import Call, Generation
from inference_space.engines.vllm_core import Core, prepare_environment
from sync import Follower, Identity, Stamp, open_store
from sync.errors import ConfigError, EngineFailed, InvalidPatch, InvalidRequest, PeerUnavailable, StopError
from sync.safetensors_io import MappedState
from sync.schema.calls import Sampling, ScoreSequence
from sync.tools.checkout import checkout

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(240), pytest.mark.filterwarnings("ignore")]
Make = Callable[..., Any]
ONE, TWO = Identity(1, 0), Identity(1, 1)
EMBED, NORM = "model.embed_tokens.weight", "model.norm.weight"


@pytest.fixture
def make() -> Iterator[Make]:
    """Engines with small limits, closed at the end; `folder` is loaded and running unless `running` is False."""
    prepare_environment(threads=1, kv_cache_gib=1)
    from inference_space.engines.vllm_engine import VllmEngine

    engines = []

    def build(folder: Path | None = None, *, running: bool = True, **settings: Any) -> VllmEngine:
        limits: dict[str, Any] = {"max_slots": 16, "max_len": 256, "max_queued": 64, "prefill_tokens": 256}
        engine = VllmEngine(**(limits | {"pause_seconds": 60} | settings))
        engines.append(engine)
        if folder is not None:
            engine.load(folder, ONE)
            if running:
                engine.resume()
        return engine

    yield build
    for engine in engines:
        engine.close()


def asked_over_http(engine: Any, follower: Follower) -> tuple[httpx.Response, httpx.Response]:
    """What /ready and /sync/status of a Space with this engine and follower answer."""
    app = create_app(engine, follower, token="t" * 16)

    async def ask() -> tuple[httpx.Response, httpx.Response]:
        transport, key = httpx.ASGITransport(app), {"Authorization": "Bearer " + "t" * 16}
        async with httpx.AsyncClient(transport=transport, base_url="http://space", headers=key) as http:
            return await http.get("/ready"), await http.get("/sync/status")

    return asyncio.run(ask())


def greedy_in_torch(folder: Path, ids: Sequence[int], tokens: int) -> list[int]:
    """The most likely continuation by transformers in float32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found = model.generate(torch.tensor([list(ids)]), max_new_tokens=tokens, do_sample=False)
    return [int(i) for i in found[0, len(ids) :]]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("kind", KINDS)
def test_after_any_update_vllm_is_a_fresh_vllm_of_that_version(
    make: Make, tmp_path: Path, kind: str, dtype: str
) -> None:
    """Bit for bit one that loads that version as we do; and in float32 plain vLLM, but for its kernels' last bits."""
    first = checkpoint(kind, tmp_path / "first")
    run = str(tmp_path / "run")
    engine, asked, said = make(dtype=dtype), prompts(5), {}
    follower = Follower(open_store(run, create=True, writable=True), tmp_path / "mirror", engine, audit_every=5)
    with publishing(open_store(run, create=True, writable=True), first) as publisher:
        follower.poll()
        state = state_of(first)
        for n in range(1, 21):
            state = edited(state, n)
            publisher.flush(state, Stamp(step=n, sync=n))
            assert follower.poll()
            engine.pause()
            assert [
                name for name, bits in state.items() if not np.array_equal(engine.read(name, None), bits.reshape(-1))
            ] == []
            engine.resume()
            said[n] = greedy(engine, asked, 12) if n >= 19 else []
    follower.close()
    assert set(engine.ways()) == set(state)
    assert set(engine.ways().values()) == {"plan"}
    store = open_store(run)
    for n in 19, 20:
        checkout(store, str(n), tmp_path / f"v{n}")
        assert sum(len(answer["ids"]) for answer in said[n]) > 20
    shapes = noise(engine, asked, 12)
    engine.close()
    loaded = {n: greedy(make(tmp_path / f"v{n}", dtype=dtype), asked, 12) for n in (19, 20)}
    for n in 19, 20:
        assert said[n] == loaded[n]
        assert said[n] != cut(said[n], loaded[39 - n])
    if dtype == "float32":
        wanted = fresh(tmp_path / "fresh.json", [tmp_path / "v19", tmp_path / "v20"], asked, 12, dtype=dtype)
        for n in 19, 20:
            assert same(said[n], wanted[f"v{n}"], shapes)
            assert not same(said[n], wanted[f"v{39 - n}"], shapes)


def test_new_weights_under_running_calls_are_exact_and_named(make: Make, tmp_path: Path) -> None:
    one, two = make_checkpoint(tmp_path / "one"), make_checkpoint(tmp_path / "two", 1)
    engine = make(one, dtype="float32")
    asked = prompts(16)
    shared = (prompts(1, 3)[0] * 100)[:200]  # above one block of keys, which the prefix cache keeps
    before = engine.generate([Call(shared, Sampling(max_tokens=3))])[0].result(60)
    assert_close_to(before.logprobs, reference(one, shared + before.output_ids, 200), 1e-3)
    futures = engine.generate([Call(p, Sampling(max_tokens=150, seed=i)) for i, p in enumerate(asked)])
    wait_until(lambda: engine.status()["output_tokens"] > 200)
    engine.pause()
    engine.apply({name: (None, bits.reshape(-1)) for name, bits in state_of(two).items()}, TWO)
    engine.resume()
    mixed = 0
    for ids, future in zip(asked, futures, strict=True):
        made: Generation = future.result(120)
        assert made.spans[-1].end == len(made.output_ids) == len(made.logprobs)
        for span in made.spans:
            folder = {"0@1": one, "1@1": two}[span.version]
            wanted = reference(folder, ids + made.output_ids, len(ids))[span.start : span.end]
            assert_close_to(made.logprobs[span.start : span.end], wanted, 1e-3)
        mixed += len(made.spans) == 2
    assert mixed
    assert engine.status()["recomputed_tokens"] > 200
    after = engine.generate([Call(shared, Sampling(max_tokens=3))])[0].result(60)
    assert_close_to(after.logprobs, reference(two, shared + after.output_ids, 200), 1e-3)


def test_drain_ends_calls_under_the_version_they_began_with(make: Make, tmp_path: Path) -> None:
    one, two = make_checkpoint(tmp_path / "one"), make_checkpoint(tmp_path / "two", 1)
    engine = make(one, dtype="float32", kv_policy="drain", max_slots=4)
    asked = prompts(6)
    futures = engine.generate([Call(p, Sampling(max_tokens=60, temperature=0.5)) for p in asked])
    wait_until(lambda: engine.status()["output_tokens"] > 20)
    engine.pause()
    assert engine.status()["active"] == 0
    engine.apply({name: (None, bits.reshape(-1)) for name, bits in state_of(two).items()}, TWO)
    engine.resume()
    versions = []
    for ids, future in zip(asked, futures, strict=True):
        made = future.result(60)
        (span,) = made.spans
        versions.append(span.version)
        folder = {"0@1": one, "1@1": two}[span.version]
        assert_close_to(made.logprobs, reference(folder, ids + made.output_ids, len(ids), 0.5), 2e-3)
    assert set(versions) == {"0@1", "1@1"}
    engine.close()
    engine = make(one, kv_policy="drain", pause_seconds=0.05)
    calls = engine.generate([Call([5, 6], Sampling(max_tokens=250))] * 16)
    wait_until(lambda: engine.status()["active"] > 0)
    with pytest.raises(PeerUnavailable, match="pause_seconds"):
        engine.pause()
    assert all(call.result(60).spans[0].version == "0@1" for call in calls)


def test_salt_keeps_running_calls_and_shares_nothing_with_older_versions(make: Make, tmp_path: Path) -> None:
    one, two = make_checkpoint(tmp_path / "one"), make_checkpoint(tmp_path / "two", 1)
    engine = make(one, dtype="float32", kv_policy="salt", max_len=512)
    long = (prompts(1, 3)[0] * 100)[:300]  # above one block of keys, which a prefix cache would share
    engine.generate([Call(long, Sampling(max_tokens=2))])[0].result(60)
    running = engine.generate([Call([5, 6], Sampling(max_tokens=400, seed=3))])[0]
    wait_until(lambda: engine.status()["output_tokens"] > 10)
    engine.pause()
    engine.apply({name: (None, bits.reshape(-1)) for name, bits in state_of(two).items()}, TWO)
    engine.resume()
    made = engine.generate([Call(long, Sampling(max_tokens=4))])[0].result(60)
    assert_close_to(made.logprobs, reference(two, long + made.output_ids, len(long)), 1e-3)
    assert running.result(60).spans[0].version == "0@1"
    assert engine.status()["recomputed_tokens"] == 0


def test_a_failed_apply_stays_paused_and_the_next_poll_reloads(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = checkpoint("qwen3-tied", tmp_path / "first")
    run = str(tmp_path / "run")
    engine = make(dtype="float32")
    follower = Follower(open_store(run, create=True, writable=True), tmp_path / "mirror", engine)
    with publishing(open_store(run, create=True, writable=True), first) as publisher:
        follower.poll()
        state = edited(state_of(first), 1)
        publisher.flush(state, Stamp(step=1, sync=1))
        from inference_space.engines.vllm_places import Mapped

        write, count = Mapped.write, iter(range(1000))

        def torn(self: Mapped, *args: Any) -> None:
            if next(count) == 3:
                raise OSError("the memory went away")
            write(self, *args)

        with monkeypatch.context() as patch:
            patch.setattr(Mapped, "write", torn)
            with pytest.raises(EngineFailed, match="the memory went away"):
                follower.poll()
        status = follower.status()
        assert (status.ready, status.mirror) == (False, "1@1")
        ready, said = asked_over_http(engine, follower)
        assert ready.status_code == 503
        for answer in ready.text, said.json()["reason"]:
            assert "failed to reach 1@1, reloading" in answer
            assert "the memory went away" in answer
        waits = engine.generate([Call([5, 6], Sampling(max_tokens=4))])[0]
        assert engine._loop.paused
        assert not waits.done()
        assert follower.poll()
        assert follower.status().ready
        assert asked_over_http(engine, follower)[0].status_code == 200
        made = waits.result(60)
        checkout(open_store(run), "1", tmp_path / "v1")
        assert_close_to(made.logprobs, reference(tmp_path / "v1", [5, 6, *made.output_ids], 2), 1e-3)
        assert made.spans[0].version == "1@1"
    follower.close()


def test_bits_arrive_exactly_whatever_they_are_and_nan_leaves_no_trace(make: Make, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "c")
    for dtype in "auto", "float32":
        engine = make(folder, running=False, dtype=dtype)
        before = {name: engine.read(name, None) for name in (EMBED, NORM)}
        index = np.arange(3, 8, dtype=np.int32)
        odd = np.array([0x8000, 0x7F80, 0xFFC1, 0x0001, 0x7FBF], dtype=np.uint16)  # −0, ∞, NaN payloads, subnormal
        for name, was in before.items():
            engine.apply({name: (index, odd)}, TWO)
            assert np.array_equal(engine.read(name, index), odd)
            assert np.array_equal(np.delete(engine.read(name, None), index), np.delete(was, index))
        engine.resume()
        with pytest.raises(InvalidRequest, match="1@1 gives logits that are not finite"):
            engine.generate([Call([5, 6, 7], Sampling(max_tokens=4))])[0].result(60)
        with pytest.raises(InvalidRequest, match="not finite"):
            engine.score([ScoreSequence(ids=(5, 6))], 1.0).result(60)
        engine.pause()
        engine.apply({name: (None, bits) for name, bits in before.items()}, Identity(1, 2))
        engine.resume()
        ids = prompts(1)[0]
        made = engine.generate([Call(ids, Sampling(max_tokens=6))])[0].result(60)
        assert_close_to(
            made.logprobs, reference(folder, ids + made.output_ids, len(ids)), 0.5 if dtype == "auto" else 1e-3
        )
        engine.close()


def test_a_call_that_meets_nan_fails_alone(make: Make, tmp_path: Path) -> None:
    """One row of the embedding is NaN: calls with its token fail, and those that get their blocks of keys do not."""
    folder = make_checkpoint(tmp_path / "c", tied=False)
    engine = make(folder, running=False, dtype="float32")
    engine.apply({EMBED: (np.arange(7 * 64, 8 * 64), np.full(64, 0x7FC0, dtype=np.uint16))}, TWO)
    engine.resume()
    whole = 0
    for seed in range(3):
        for bad in engine.generate([Call([7] * 200, Sampling(max_tokens=3))] * 16):
            assert isinstance(bad.exception(60), InvalidRequest)
        asked = [[i for i in ids if i != 7] or [5] for ids in prompts(16, seed)]
        calls = [Call(ids, Sampling(max_tokens=20, temperature=0.0)) for ids in asked]
        for ids, future in zip(asked, engine.generate(calls), strict=True):
            if future.exception(60) is None:
                made, whole = future.result(), whole + 1
                assert_close_to(made.logprobs, reference(folder, ids + made.output_ids, len(ids)), 1e-3)
            else:  # it may say the token itself
                said = greedy_in_torch(folder, ids, 20)
                assert 7 in said[:-1]
    assert whole > 30


@pytest.mark.parametrize("how", ["cancelled", "update", "score"])
def test_what_is_given_up_before_anyone_saw_its_nan_leaves_none(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """A prompt of NaN is read in several steps and ends between two of them: the next call gets its block."""
    folder = make_checkpoint(tmp_path / "c", tied=False)
    engine = make(folder, running=False, dtype="float32", prefill_tokens=48)
    row = np.arange(7 * 64, 8 * 64)
    before = engine.read(EMBED, row)
    engine.apply({EMBED: (row, np.full(64, 0x7FC0, dtype=np.uint16))}, TWO)
    step, between, on = Core.step, threading.Event(), threading.Event()

    def slow(core: Core) -> list[Any]:
        done = list(step(core))
        between.set()
        assert on.wait(60)
        return done

    monkeypatch.setattr(Core, "step", slow)
    engine.resume()
    if how == "score":
        given_up: Any = engine.score([ScoreSequence(ids=(7,) * 100, start=1)], 1.0)
    else:
        (given_up,) = engine.generate([Call([7] * 100, Sampling(max_tokens=3))])
    assert between.wait(60)
    if how == "cancelled":
        assert given_up.cancel()
        on.set()
    else:
        threading.Timer(0.3, on.set).start()
        engine.pause()
        engine.apply({EMBED: (row, before)}, Identity(1, 2))
        assert given_up.cancel()
        engine.resume()
    asked = [[i for i in ids if i != 7][:40] or [5] for ids in prompts(16)]
    calls = [Call(ids, Sampling(max_tokens=2, temperature=0.0)) for ids in asked]
    for ids, future in zip(asked, engine.generate(calls), strict=True):
        made = future.result(60)
        assert_close_to(made.logprobs, reference(folder, ids + made.output_ids, len(ids)), 1e-3)


@pytest.mark.parametrize("policy", ["recompute", "drain", "salt"])
def test_seeded_calls_live_through_updates(make: Make, tmp_path: Path, policy: str) -> None:
    """32 at once, prompts read in several steps, twice again after each update: what vLLM on a CPU dies of when it gets
    a seed. So it gets none."""
    folder = make_checkpoint(tmp_path / "c")
    engine = make(folder, dtype="float32", kv_policy=policy, max_slots=32, prefill_tokens=64)
    asked = [(ids * 20)[: 60 + 3 * i] for i, ids in enumerate(prompts(32, 9))]
    versions = set()
    for n in range(2):
        most = engine.status()["output_tokens"] + 60
        futures = engine.generate([Call(ids, Sampling(max_tokens=40, seed=i)) for i, ids in enumerate(asked)])
        wait_until(partial(lambda most: engine.status()["output_tokens"] > most, most))
        engine.pause()
        engine.apply({NORM: (np.arange(1), np.full(1, 0x3F80 + n, np.uint16))}, Identity(1, n + 1))
        engine.resume()
        for future in futures:
            versions |= {span.version for span in future.result(120).spans}
    assert engine.failure == ""
    assert versions == {"0@1", "1@1"} if policy == "drain" else versions == {"0@1", "1@1", "2@1"}


def test_vllm_never_aliases_the_checkpoint_file(make: Make, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "c")
    engine = make(folder, running=False)
    mapped = MappedState(folder / "model.safetensors", writable=True)
    before = {name: engine.read(name, None) for name in mapped.schema}
    for bits in mapped.state.values():
        bits[...] ^= 0x0101
    mapped.flush()
    assert [name for name, was in before.items() if not np.array_equal(engine.read(name, None), was)] == []


def test_a_dead_engine_fails_everything_with_its_reason(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make(make_checkpoint(tmp_path / "c"), running=False)
    futures = engine.generate([Call([5], Sampling(max_tokens=9))] * 20)
    futures.append(engine.score([ScoreSequence(ids=(5, 6))], 1.0))

    def broken(*_: object) -> None:
        raise MemoryError("no room for this step")

    monkeypatch.setattr("inference_space.engines.vllm_core.Core.step", broken)
    engine.resume()
    for future in futures:
        with pytest.raises(StopError, match="no room for this step"):
            future.result(60)
    assert "MemoryError" in engine.failure
    for attempt in (lambda: engine.generate([Call([5], Sampling())]), engine.pause):
        with pytest.raises(StopError, match="no room"):
            attempt()


def test_a_wrong_patch_is_refused_before_anything_is_written(make: Make, tmp_path: Path) -> None:
    engine = make(make_checkpoint(tmp_path / "c"), running=False)
    before = engine.read(NORM, None)
    good = {NORM: (None, np.zeros(before.shape, dtype=np.uint16))}
    bad: list[dict[str, Any]] = [
        {"lm_head.bias": (None, np.zeros(1, dtype=np.uint16))},
        {EMBED: (np.array([0, 10**7]), np.zeros(2, dtype=np.uint16))},
        {EMBED: (np.array([3, 3]), np.zeros(2, dtype=np.uint16))},
        {EMBED: (np.array([1, 3]), np.zeros(2, dtype=np.uint32))},
        {EMBED: (None, np.zeros(3, dtype=np.uint16))},
    ]
    for wrong in bad:
        with pytest.raises(InvalidPatch):
            engine.apply(good | wrong, TWO)
        assert np.array_equal(engine.read(NORM, None), before)
    engine.resume()
    with pytest.raises(StopError, match="between pause and resume"):
        engine.apply({}, TWO)


def test_scores_equal_teacher_forcing_at_their_temperature(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inference_space.engines.vllm_worker.SCORE_LOGITS", 320 * 7)  # seven positions at a time
    folder = make_checkpoint(tmp_path / "c", tied=False)
    engine = make(folder, dtype="float32", prefill_tokens=48)
    asked = [([*ids, 9, 10], 1 + i % len(ids)) for i, ids in enumerate(prompts(6))]
    crowd = engine.generate([Call(p, Sampling(max_tokens=30, temperature=0.0)) for p in prompts(6)])
    wanted = [engine.score([ScoreSequence(ids=tuple(ids), start=s) for ids, s in asked], t) for t in (0.7, 1.0, 2.0)]
    for temperature, future in zip((0.7, 1.0, 2.0), wanted, strict=True):
        scores = future.result(60)
        assert scores.identity == ONE
        for (ids, start), found in zip(asked, scores.logprobs, strict=True):
            assert_close_to(found, reference(folder, ids, start, temperature), 1e-3)
    for ids, made in zip(prompts(6), [future.result(60) for future in crowd], strict=True):
        assert_close_to(made.logprobs, reference(folder, ids + made.output_ids, len(ids)), 1e-3)


def test_limits_cancelled_calls_and_a_full_queue(make: Make, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "c")
    engine = make()
    with pytest.raises(PeerUnavailable, match="/ready"):
        engine.generate([Call([5], Sampling())])
    engine = make(folder, max_len=64, max_queued=3, max_slots=2, dtype="float32")
    for ids, code in (([], "empty_prompt"), ([5] * 64, "prompt_too_long"), ([5, 10**6], "unknown_token")):
        bad, good = engine.generate([Call(ids, Sampling()), Call([5], Sampling(max_tokens=3))])
        assert bad.exception(60).code == code
        assert good.result(60).output_ids
    full = engine.generate([Call([5] * 60, Sampling(max_tokens=100, temperature=3.0))])[0].result(60)
    assert full.finish_reason == "stop" or len(full.output_ids) == 4
    cold = engine.generate([Call([5, 6], Sampling(max_tokens=5, temperature=0.002))])[0].result(60)
    assert_close_to(cold.logprobs, reference(folder, [5, 6, *cold.output_ids], 2, 0.002), 0.5)
    engine.score([ScoreSequence(ids=(5,) * 64, start=60)], 1.0).result(60)
    engine.pause()
    kept = engine.generate([Call([5], Sampling(max_tokens=50))] * 2)
    with pytest.raises(InvalidRequest, match="max_queued") as caught:
        engine.generate([Call([5], Sampling(max_tokens=1))] * 2)
    assert (caught.value.status, caught.value.code) == (429, "overloaded")
    assert kept[0].cancel()
    engine.resume()
    assert kept[1].result(60).output_ids
    long = engine.generate([Call([5], Sampling(max_tokens=60, temperature=0.0))] * 2)
    assert long[1].cancel()
    assert long[0].result(60).output_ids
    wait_until(lambda: engine.status()["active"] == 0)
    end = engine.tokenizer.eos_token_id
    made = [f.result(60) for f in engine.generate([Call([5, 6], Sampling(max_tokens=60, temperature=3.0))] * 3)]
    assert all((m.finish_reason == "stop") == (m.output_ids[-1] == end) for m in made)


def test_another_shape_is_built_anew_and_what_cannot_be_held_is_refused(make: Make, tmp_path: Path) -> None:
    engine = make(make_checkpoint(tmp_path / "one"), running=False, dtype="float32")
    waits = engine.generate([Call([5], Sampling())])[0]
    other = make_checkpoint(tmp_path / "two", tied=False, num_hidden_layers=1)
    engine.load(other, TWO)
    engine.resume()
    with pytest.raises(InvalidRequest, match="changed its shape"):
        waits.result(60)
    made = engine.generate([Call([5, 6], Sampling(max_tokens=3))])[0].result(60)
    assert_close_to(made.logprobs, reference(other, [5, 6, *made.output_ids], 2), 1e-3)
    engine.close()
    with pytest.raises(StopError, match="shutting down"):
        engine.generate([Call([5], Sampling())])
    with pytest.raises(ConfigError, match="vLLM cannot serve this checkpoint"):
        make(make_checkpoint(tmp_path / "short", max_position_embeddings=64), max_len=256)
