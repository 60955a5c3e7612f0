"""The torch engine against a plain transformers forward: exact logprobs, versions, limits, failures."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support_tiny import assert_close_to, make_checkpoint, prompts, reference, wait_until

from inference_space.engines.base import Call, Generation
from inference_space.engines.forward import Passes
from inference_space.engines.torch_engine import TorchEngine
from sync.errors import ConfigError, CorruptObject, InvalidPatch, InvalidRequest, PeerUnavailable, StopError
from sync.safetensors_io import MappedState
from sync.schema.base import Identity
from sync.schema.calls import Sampling, ScoreSequence

pytestmark = pytest.mark.unit
ONE, TWO = Identity(1, 0), Identity(1, 1)
EMBED = "model.embed_tokens.weight"
Make = Callable[..., TorchEngine]


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("one") / "checkpoint", seed=0)


@pytest.fixture(scope="module")
def second(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("two") / "checkpoint", seed=1)


@pytest.fixture
def make() -> Iterator[Make]:
    """Engines with small limits, closed at the end; `folder` is loaded and running unless `running` is False."""
    engines = []

    def build(folder: Path | None = None, *, running: bool = True, **settings: Any) -> TorchEngine:
        engine = TorchEngine(**({"max_slots": 32, "max_len": 512, "max_queued": 256, "pause_seconds": 60} | settings))
        engines.append(engine)
        if folder is not None:
            engine.load(folder, ONE)
            if running:
                engine.resume()
        return engine

    yield build
    for engine in engines:
        engine.close()


def ask(engine: TorchEngine, ids: Sequence[Sequence[int]], **sampling: Any) -> list[Generation]:
    seed = sampling.pop("seed", 0)
    calls = [Call(p, Sampling(seed=seed + i, **sampling)) for i, p in enumerate(ids)]
    return [future.result(60) for future in engine.generate(calls)]


def patches(old: Path, new: Path, *, sparse: bool = True) -> dict[str, Any]:
    before, after = MappedState(old / "model.safetensors").state, MappedState(new / "model.safetensors").state
    found: dict[str, Any] = {}
    for name, bits in after.items():
        index = np.flatnonzero(bits.reshape(-1) != before[name].reshape(-1))
        values = np.array(bits.reshape(-1))
        found[name] = (index, values[index]) if sparse and "mlp" in name else (None, values)
    return found


def everything(engine: TorchEngine, names: Sequence[str]) -> dict[str, Any]:
    engine.pause()
    found = {name: engine.read(name, None) for name in names}
    engine.resume()
    return found


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("temperature", [1.0, 0.5, 3.0])
def test_logprobs_equal_teacher_forcing_in_mixed_batches(
    make: Make, tmp_path: Path, tied: bool, temperature: float
) -> None:
    folder = make_checkpoint(tmp_path / "c", seed=3, tied=tied)
    engine, asked = make(folder, max_slots=8), prompts(20)
    for ids, made in zip(asked, ask(engine, asked, max_tokens=12, temperature=temperature), strict=True):
        assert_close_to(made.logprobs, reference(folder, ids + made.output_ids, len(ids), temperature))
        assert made.spans[0].version == "0@1"
        assert (made.spans[0].start, made.spans[0].end, len(made.spans)) == (0, len(made.output_ids), 1)


def test_temperature_zero_takes_the_most_likely_token_and_reports_temperature_one(make: Make, first: Path) -> None:
    engine, ids = make(first), prompts(1)[0]
    made = ask(engine, [ids], max_tokens=8, temperature=0.0)[0]
    assert_close_to(made.logprobs, reference(first, ids + made.output_ids, len(ids)))
    assert ask(engine, [ids], max_tokens=8, temperature=0.0, seed=9)[0].output_ids == made.output_ids


def test_a_seeded_call_repeats_whatever_runs_beside_it(make: Make, first: Path) -> None:
    engine, asked = make(first, max_slots=5), prompts(16)
    crowd = ask(engine, asked, max_tokens=20, seed=100)
    alone = [ask(engine, [ids], max_tokens=20, seed=100 + i)[0] for i, ids in enumerate(asked)]
    assert [m.output_ids for m in alone] == [m.output_ids for m in crowd]
    assert ask(engine, asked, max_tokens=20, seed=500) != crowd


def test_sequences_of_any_length_join_and_leave_at_every_step(make: Make, first: Path) -> None:
    engine, asked = make(first, max_slots=3, prefill_tokens=64), prompts(24, seed=5)
    end = engine.tokenizer.eos_token_id
    calls = [Call(p, Sampling(max_tokens=1 + i % 7, seed=i)) for i, p in enumerate(asked)]
    for ids, call, future in zip(asked, calls, engine.generate(calls), strict=True):
        made = future.result(60)
        assert_close_to(made.logprobs, reference(first, ids + made.output_ids, len(ids)))
        full = len(made.output_ids) == call.sampling.max_tokens
        assert made.finish_reason == "length" if full and made.output_ids[-1] != end else "stop"
    status = engine.status()
    assert (status["active"], status["queued"]) == (0, 0)
    assert status["prompt_tokens"] == sum(map(len, asked))


def test_the_end_token_ends_a_call_and_belongs_to_the_output(make: Make, first: Path) -> None:
    engine = make(first)
    end = engine.tokenizer.eos_token_id
    made = [m for m in ask(engine, prompts(32), max_tokens=200, temperature=3.0) if m.finish_reason == "stop"]
    assert made
    assert all(m.output_ids.index(end) == len(m.output_ids) - 1 for m in made)


def test_output_ends_at_max_len(make: Make, first: Path) -> None:
    engine = make(first, max_len=24)
    made = ask(engine, [[5] * 20], max_tokens=100, temperature=0.0)[0]
    assert (len(made.output_ids), made.finish_reason) == (4, "length")


def run_and_pause_midway(engine: TorchEngine, calls: Sequence[Call]) -> list[Future[Generation]]:
    """Start `calls` on a paused engine; pause it again at the step in which the first of them ends."""
    reached, gate = threading.Event(), threading.Event()
    futures = engine.generate(calls)

    def hold(_: object) -> None:
        reached.set()
        gate.wait(60)

    futures[0].add_done_callback(hold)
    engine.resume()
    assert reached.wait(60)
    pausing = threading.Thread(target=engine.pause)
    pausing.start()
    wait_until(lambda: engine._scheduler._paused)
    gate.set()
    pausing.join(60)
    return futures


def test_new_weights_under_running_calls_are_exact_and_named(make: Make, first: Path, second: Path) -> None:
    engine, asked = make(first, running=False, max_slots=6), prompts(12)
    calls = [Call(p, Sampling(max_tokens=200 if i else 9, seed=i)) for i, p in enumerate(asked)]
    futures = run_and_pause_midway(engine, calls)
    before = engine.status()["output_tokens"]
    change = patches(first, second)
    engine.apply(change, TWO)
    for name, (index, values) in change.items():
        assert np.array_equal(engine.read(name, index), values)
    assert engine.status()["output_tokens"] == before
    engine.resume()
    mixed = 0
    for ids, future in zip(asked, futures, strict=True):
        made = future.result(60)
        for span in made.spans:
            folder = {"0@1": first, "1@1": second}[span.version]
            wanted = reference(folder, ids + made.output_ids, len(ids))[span.start : span.end]
            assert_close_to(made.logprobs[span.start : span.end], wanted)
        mixed += len(made.spans) == 2
    assert mixed
    assert int(engine.status()["recomputed_tokens"]) > 0


def test_a_reload_under_running_calls_is_exact_too(make: Make, first: Path, second: Path) -> None:
    engine, ids = make(first, running=False), prompts(1)[0]
    calls = [Call(ids, Sampling(max_tokens=n, seed=1, temperature=0.2)) for n in (5, 60)]
    future = run_and_pause_midway(engine, calls)[1]
    engine.load(second, TWO)
    engine.resume()
    made = future.result(60)
    wanted = [reference(f, ids + made.output_ids, len(ids), 0.2) for f in (first, second)]
    for span, lps in zip(made.spans, wanted, strict=True):
        assert_close_to(made.logprobs[span.start : span.end], lps[span.start : span.end])


def test_calls_wait_while_the_engine_is_paused(make: Make, first: Path) -> None:
    engine = make(first, running=False)
    future = engine.generate([Call([5, 6], Sampling(max_tokens=2))])[0]
    assert engine.status()["queued"] == 1
    assert not future.done()
    engine.resume()
    assert future.result(60).output_ids


def test_the_engine_never_aliases_the_checkpoint_file(make: Make, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "c")
    for dtype in ("float32", "bfloat16"):
        engine = make(folder, dtype=dtype)
        sequence = ScoreSequence(ids=tuple(prompts(1)[0] + [7, 8]))
        mapped = MappedState(folder / "model.safetensors", writable=True)
        names = list(mapped.schema)
        before, scores = everything(engine, names), engine.score([sequence], 1.0).result(60)
        for bits in mapped.state.values():
            bits[...] ^= 0x0101
        mapped.flush()
        assert all(np.array_equal(before[name], held) for name, held in everything(engine, names).items())
        assert engine.score([sequence], 1.0).result(60) == scores


def test_tied_weights_stay_tied(make: Make, first: Path) -> None:
    engine = make(first, running=False)
    new = np.full(engine.read(EMBED, None).shape, 0x3E00, dtype=np.uint16)
    engine.apply({EMBED: (None, new)}, TWO)
    engine.resume()
    made = ask(engine, [[5, 6]], max_tokens=1)[0]
    assert_close_to(made.logprobs, [-np.log(len(engine.tokenizer))], 1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bits_are_held_exactly_whatever_they_are(make: Make, first: Path, dtype: str) -> None:
    engine = make(first, running=False, dtype=dtype)
    index = np.arange(5, dtype=np.int32)
    odd = np.array([0x8000, 0x7F80, 0xFFC1, 0x0001, 0x7FBF], dtype=np.uint16)  # −0, ∞, NaN payloads, subnormal
    engine.apply({EMBED: (index, odd)}, TWO)
    assert np.array_equal(engine.read(EMBED, index), odd)


@pytest.mark.parametrize(
    "bad",
    [
        {"lm_head.bias": (None, np.zeros(1, dtype=np.uint16))},
        {EMBED: (np.array([0, 10**7]), np.zeros(2, dtype=np.uint16))},
        {EMBED: (np.array([-1, 3]), np.zeros(2, dtype=np.uint16))},
        {EMBED: (np.array([3, 3]), np.zeros(2, dtype=np.uint16))},
        {EMBED: (np.array([1, 3]), np.zeros(3, dtype=np.uint16))},
        {EMBED: (np.array([1, 3]), np.zeros(2, dtype=np.uint32))},
        {EMBED: (None, np.zeros(3, dtype=np.uint16))},
    ],
)
def test_a_wrong_patch_is_refused_before_anything_is_written(make: Make, first: Path, bad: dict[str, Any]) -> None:
    engine = make(first, running=False)
    before = engine.read("model.norm.weight", None)
    good = {"model.norm.weight": (None, np.zeros(before.shape, dtype=np.uint16))}
    with pytest.raises(InvalidPatch):
        engine.apply({**good, **bad}, TWO)
    assert np.array_equal(engine.read("model.norm.weight", None), before)


def test_weights_are_not_touched_while_passes_may_run(make: Make, first: Path) -> None:
    engine = make(first)
    with pytest.raises(StopError, match="between pause and resume"):
        engine.apply({}, TWO)


@pytest.mark.parametrize("prefill", [16, 4096])
def test_scores_equal_teacher_forcing(make: Make, first: Path, prefill: int) -> None:
    engine = make(first, prefill_tokens=prefill)
    asked = [([*ids, 9, 10], 1 + i % len(ids)) for i, ids in enumerate(prompts(12))]
    scores = engine.score([ScoreSequence(ids=tuple(ids), start=s) for ids, s in asked], 0.7).result(60)
    assert scores.identity == ONE
    for (ids, start), found in zip(asked, scores.logprobs, strict=True):
        assert_close_to(found, reference(first, ids, start, 0.7))


@pytest.mark.parametrize(
    ("ids", "code"),
    [([], "empty_prompt"), ([5] * 64, "prompt_too_long"), ([5, 10**6], "unknown_token")],
)
def test_a_refused_call_fails_alone(make: Make, first: Path, ids: list[int], code: str) -> None:
    engine = make(first, max_len=64)
    bad, good = engine.generate([Call(ids, Sampling()), Call([5], Sampling(max_tokens=3))])
    error = bad.exception(60)
    assert isinstance(error, InvalidRequest)
    assert error.code == code
    assert good.result(60).output_ids


def test_wrong_scores_are_refused(make: Make, first: Path) -> None:
    engine = make(first, max_len=8)
    for ids, start, match in (((5,) * 9, 1, "max_len"), ((5, 6), 2, "not a position"), ((5, 10**6), 1, "vocabulary")):
        with pytest.raises(InvalidRequest, match=match):
            engine.score([ScoreSequence(ids=ids, start=start)], 1.0)


def test_a_full_queue_takes_none_of_a_batch(make: Make, first: Path) -> None:
    engine = make(first, running=False, max_queued=3)
    kept = engine.generate([Call([5], Sampling(max_tokens=1))] * 2)
    with pytest.raises(InvalidRequest, match="max_queued") as caught:
        engine.generate([Call([5], Sampling(max_tokens=1))] * 2)
    assert (caught.value.status, caught.value.code) == (429, "overloaded")
    with pytest.raises(InvalidRequest, match="max_queued"):
        engine.score([ScoreSequence(ids=(5, 6))] * 2, 1.0)
    engine.resume()
    assert all(future.result(60).output_ids for future in kept)


def test_a_cancelled_call_leaves_and_the_others_go_on(make: Make, first: Path) -> None:
    engine = make(first, running=False)
    gone, stays = engine.generate([Call([5], Sampling(max_tokens=400, seed=1)), Call([6], Sampling(max_tokens=9))])
    engine.resume()
    assert gone.cancel()
    assert stays.result(60).output_ids
    wait_until(lambda: engine.status()["active"] == 0)
    assert gone.cancelled()


def test_weights_that_give_nan_fail_their_calls_and_leave_no_trace(make: Make, first: Path, second: Path) -> None:
    engine, asked = make(first, running=False), prompts(4)
    norm = engine.read("model.norm.weight", None)
    spoiled = {"model.norm.weight": (None, np.full(norm.shape, 0x7FC0, dtype=np.uint16))}
    engine.apply(spoiled, TWO)
    engine.resume()
    for future in engine.generate([Call(p, Sampling(max_tokens=4)) for p in asked]):
        with pytest.raises(InvalidRequest, match="1@1 gives logits that are not finite"):
            future.result(60)
    with pytest.raises(InvalidRequest, match="not finite"):
        engine.score([ScoreSequence(ids=(5, 6))], 1.0).result(60)
    engine.pause()
    engine.apply({"model.norm.weight": (None, norm)}, Identity(1, 2))
    engine.resume()
    for ids, made in zip(asked, ask(engine, asked, max_tokens=6), strict=True):
        assert_close_to(made.logprobs, reference(first, ids + made.output_ids, len(ids)))


@pytest.mark.parametrize("spoiled", [0, 7])
def test_a_call_that_meets_nan_fails_alone(make: Make, tmp_path: Path, spoiled: int) -> None:
    """One row of the embedding is NaN: calls with its token fail, and those that get their slots do not."""
    folder = make_checkpoint(tmp_path / "c", tied=False)
    engine = make(folder, running=False, max_slots=8)
    engine.apply({EMBED: (np.arange(spoiled * 64, spoiled * 64 + 64), np.full(64, 0x7FC0, dtype=np.uint16))}, TWO)
    engine.resume()
    whole = 0
    for seed in range(3):
        bad = engine.generate([Call([spoiled] * 90, Sampling(max_tokens=3))] * 8)
        asked = [[i for i in ids if i != spoiled] or [5] for ids in prompts(16, seed)]
        good = engine.generate([Call(ids, Sampling(max_tokens=12, seed=n)) for n, ids in enumerate(asked)])
        assert all(isinstance(future.exception(60), InvalidRequest) for future in bad)
        for ids, future in zip(asked, good, strict=True):
            if future.exception(60) is None:  # else it sampled the token itself
                made, whole = future.result(), whole + 1
                assert_close_to(made.logprobs, reference(folder, ids + made.output_ids, len(ids)))
    assert whole > 30


def test_a_dead_scheduler_fails_everything_with_its_reason(
    make: Make, first: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make(first, running=False)

    def broken(*_: object) -> torch.Tensor:
        raise MemoryError("no room for this step")

    monkeypatch.setattr(Passes, "decode", broken)
    futures: list[Future[Any]] = [*engine.generate([Call([5], Sampling(max_tokens=9))] * 3)]
    futures.append(engine.score([ScoreSequence(ids=(5, 6))], 1.0))
    engine.resume()
    for future in futures:
        with pytest.raises(StopError, match="no room for this step"):
            future.result(60)
    assert "MemoryError" in engine.failure
    for attempt in (lambda: engine.generate([Call([5], Sampling())]), engine.pause):
        with pytest.raises(StopError, match="no room"):
            attempt()


def test_calls_before_the_first_weights_are_told_to_wait(make: Make) -> None:
    engine = make()
    with pytest.raises(PeerUnavailable, match="/ready"):
        engine.generate([Call([5], Sampling())])


def test_closing_fails_what_waits(make: Make, first: Path) -> None:
    engine = make(first, running=False)
    future = engine.generate([Call([5], Sampling())])[0]
    engine.close()
    with pytest.raises(PeerUnavailable, match="shutting down"):
        future.result(60)


def test_another_shape_fails_what_runs_on_the_old_model(make: Make, first: Path, tmp_path: Path) -> None:
    engine = make(first, running=False)
    future = engine.generate([Call([5], Sampling())])[0]
    old = engine._passes
    assert old is not None
    other = make_checkpoint(tmp_path / "c", num_hidden_layers=1)
    engine.load(other, TWO)
    engine.resume()
    with pytest.raises(InvalidRequest, match="changed its shape"):
        future.result(60)
    with pytest.raises(InvalidRequest, match="changed its shape"):
        engine._scheduler.submit(old, ())  # what was checked against the old vocabulary must not run on the new
    made = ask(engine, [[5, 6]], max_tokens=3)[0]
    assert_close_to(made.logprobs, reference(other, [5, 6, *made.output_ids], 2))


def test_checkpoints_that_cannot_be_served_exactly_are_refused(make: Make, first: Path, tmp_path: Path) -> None:
    sliding = make_checkpoint(tmp_path / "s", layer_types=["sliding_attention"] * 2, use_sliding_window=True)
    deeper = make_checkpoint(tmp_path / "d", num_hidden_layers=3)
    (deeper / "model.safetensors").write_bytes((first / "model.safetensors").read_bytes())
    engine = make()
    for folder, match in ((sliding, "full attention"), (deeper, "lacks")):
        with pytest.raises(ConfigError, match=match):
            engine.load(folder, ONE)
    (deeper / "model.safetensors").write_bytes(b"x" * 100)
    with pytest.raises(CorruptObject):
        engine.load(deeper, ONE)
    with pytest.raises(StopError):
        engine.resume()
    engine.load(first, ONE)
    engine.resume()
    assert ask(engine, [[5]], max_tokens=1)[0].output_ids
