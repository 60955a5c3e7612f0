"""Tensors that cannot be patched by place in vLLM: patched by its own API, or reloaded; exact all the same.

Needs vLLM's build for CPUs, which has an environment of its own: `make test-vllm`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed here; run make test-vllm", allow_module_level=True)

from support_tiny import make_checkpoint, prompts, publishing, state_of
from vllm_live import checkpoint, edited, fresh, greedy, noise, same

from inference_space.engines.vllm_core import prepare_environment
from sync import Follower, Identity, Stamp, open_store
from sync.errors import ConfigError, EngineFailed
from sync.tools.checkout import checkout

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900), pytest.mark.filterwarnings("ignore")]
Make = Callable[..., Any]
NORM = "model.norm.weight"
CASES: dict[str, tuple[str, int, tuple[str, ...], set[str]]] = {
    "experts": ("qwen3-moe", 1, ("plan", "patch", "dense"), {"plan", "dense"}),
    "experts with biases, two ranks": ("gpt-oss", 2, ("plan", "patch", "dense"), {"plan", "patch", "dense"}),
    "vLLM's patches": ("qwen3-tied", 1, ("patch",), {"patch"}),
    "vLLM's reload": ("qwen3-untied", 1, ("dense",), {"dense"}),
}


@pytest.fixture
def make() -> Iterator[Make]:
    """Engines with small limits, closed at the end; `folder` is loaded."""
    prepare_environment(threads=1, kv_cache_gib=1)
    from inference_space.engines.vllm_engine import VllmEngine

    engines = []

    def build(folder: Path | None = None, **settings: Any) -> VllmEngine:
        limits: dict[str, Any] = {"max_slots": 8, "max_len": 256, "prefill_tokens": 256, "pause_seconds": 60}
        engine = VllmEngine(**(limits | settings))
        engines.append(engine)
        if folder is not None:
            engine.load(folder, Identity(1, 0))
        return engine

    yield build
    for engine in engines:
        engine.close()


@pytest.mark.parametrize("case", CASES)
def test_whatever_the_way_vllm_is_a_fresh_vllm_of_that_version(make: Make, tmp_path: Path, case: str) -> None:
    kind, ranks, allowed, used = CASES[case]
    first, run, asked = checkpoint(kind, tmp_path / "first"), str(tmp_path / "run"), prompts(4)
    engine, said = make(tensor_parallel=ranks, ways=allowed, dtype="float32"), {}
    follower = Follower(open_store(run, create=True, writable=True), tmp_path / "mirror", engine, audit_every=2)
    with publishing(open_store(run, create=True, writable=True), first) as publisher:
        follower.poll()
        state = state_of(first)
        for n in range(1, 6):
            state = edited(state, n)
            publisher.flush(state, Stamp(step=n, sync=n))
            assert follower.poll()
            said[n] = greedy(engine, asked, 10) if n >= 4 else []
    assert follower.status().digest_failures == 0
    assert set(engine.ways().values()) == used
    assert set(engine.ways()) == set(state)
    follower.close()
    shapes = noise(engine, asked, 10)
    engine.close()
    checkout(open_store(run), "5", tmp_path / "v5")
    wanted = fresh(tmp_path / "fresh.json", [tmp_path / "v5"], asked, 10, ranks=ranks, dtype="float32")["v5"]
    assert sum(len(answer["ids"]) for answer in said[5]) > 15
    assert same(said[5], wanted, shapes)
    assert not same(said[4], wanted, shapes)


def test_what_vllm_holds_beside_the_shadow_is_noticed(make: Make, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "c")
    odd = np.array([0x8000, 0x7F80, 0xFFC1, 0x0001, 0x7FBF], dtype=np.uint16)  # −0, ∞, NaN payloads, subnormal
    index = np.arange(3, 8, dtype=np.int32)
    for way in "patch", "dense":
        engine = make(folder, ways=(way,))
        engine.apply({NORM: (index, odd)}, Identity(1, 1))
        assert np.array_equal(engine.read(NORM, index), odd)
        model = engine._weights.core._engine.collective_rpc(lambda worker: worker.model_runner.get_model())[0]
        model.model.norm.weight.data[40] += 1
        engine.pause()
        with pytest.raises(EngineFailed, match=r"other bits|changes the model"):
            engine.read(NORM, None)
        engine.close()


def test_with_plans_alone_what_vllm_rearranges_is_refused_by_name(make: Make, tmp_path: Path) -> None:
    """Experts on a CPU: patched where the loader puts them they would be spoiled without a word."""
    folder = checkpoint("qwen3-moe", tmp_path / "c")
    for ways in ("plan",), ("plan", "patch"):
        engine = make(ways=ways)
        with pytest.raises(ConfigError, match=r"experts.*in any of the ways plan"):
            engine.load(folder, Identity(1, 0))
        engine.close()
