"""Two workers that share a model (tensor_parallel = 2), each a process: bits, tokens, failures, and their end.

Needs vLLM's build for CPUs, which has an environment of its own: `make test-vllm`.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed here; run make test-vllm", allow_module_level=True)

from support.devhub import ROOT
from support_tiny import assert_close_to, make_checkpoint, prompts, publishing, reference, state_of, wait_until
from vllm_live import checkpoint, edited, fresh, greedy, noise, same

from inference_space.engines.base import Call
from inference_space.engines.vllm_core import prepare_environment
from sync import Follower, Identity, Stamp, open_store
from sync.errors import EngineFailed, StopError
from sync.schema.calls import Sampling, ScoreSequence
from sync.tools.checkout import checkout

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900), pytest.mark.filterwarnings("ignore")]
EMBED = "model.embed_tokens.weight"


@pytest.fixture
def engine() -> Iterator[Any]:
    """An engine on two workers, without weights."""
    prepare_environment(threads=1, kv_cache_gib=1)
    from inference_space.engines.vllm_engine import VllmEngine

    engine = VllmEngine(
        max_slots=16,
        max_len=256,
        max_queued=64,
        prefill_tokens=256,
        pause_seconds=60,
        tensor_parallel=2,
        dtype="float32",
    )
    yield engine
    engine.close()


def on_workers(engine: Any, function: Any) -> list[Any]:
    """Run a function of a worker in each worker."""
    found: list[Any] = engine._weights.core._engine.collective_rpc(function)
    return found


def tear_the_next_write(worker: Any) -> None:
    """Have the second rank fail in the middle of its next scatter, after three tensors."""
    from inference_space.engines.vllm_places import Mapped

    if worker.rank == 0:
        return
    write, count = Mapped.write, iter(range(4))

    def torn(self: Mapped, *args: Any) -> None:
        if next(count) == 3:
            Mapped.write = write  # type: ignore[method-assign]
            raise OSError("the memory went away")
        write(self, *args)

    Mapped.write = torn  # type: ignore[method-assign,assignment]


@pytest.mark.parametrize("kind", ["qwen3-tied", "qwen3-untied"])
def test_two_ranks_say_what_a_fresh_vllm_on_two_ranks_says(engine: Any, tmp_path: Path, kind: str) -> None:
    """After 20 random updates, one of them broken off on one rank; and the version before says something else."""
    first = checkpoint(kind, tmp_path / "first")
    run, asked = str(tmp_path / "run"), prompts(5)
    said = {}
    follower = Follower(open_store(run, create=True, writable=True), tmp_path / "mirror", engine, audit_every=5)
    with publishing(open_store(run, create=True, writable=True), first) as publisher:
        follower.poll()
        assert engine.status()["tensor_parallel"] == 2
        state = state_of(first)
        for n in range(1, 21):
            state = edited(state, n)
            publisher.flush(state, Stamp(step=n, sync=n))
            if n == 7:
                on_workers(engine, tear_the_next_write)
                with pytest.raises(EngineFailed, match="worker 1: OSError: the memory went away"):
                    follower.poll()
                assert not follower.status().ready
                assert engine._loop.paused
            assert follower.poll()
            assert follower.status().ready
            said[n] = greedy(engine, asked, 12) if n >= 19 else []
    engine.pause()
    assert [n for n, bits in state.items() if not np.array_equal(engine.read(n, None), bits.reshape(-1))] == []
    assert follower.status().digest_failures == 0
    follower.close()
    assert set(engine.ways().values()) == {"plan"}
    assert set(engine.ways()) == set(state)
    engine.resume()
    shapes = noise(engine, asked, 12)
    engine.close()
    checkout(open_store(run), "20", tmp_path / "v20")
    wanted = fresh(tmp_path / "fresh.json", [tmp_path / "v20"], asked, 12, ranks=2, dtype="float32")["v20"]
    assert sum(len(answer["ids"]) for answer in said[20]) > 20
    assert same(said[20], wanted, shapes)
    assert not same(said[19], wanted, shapes)


def test_scores_updates_under_running_calls_and_a_lost_worker(engine: Any, tmp_path: Path) -> None:
    one, two = make_checkpoint(tmp_path / "one"), make_checkpoint(tmp_path / "two", 1)
    engine._dtype = "float32"
    engine.load(one, Identity(1, 0))
    engine.resume()
    ids = prompts(1)[0]
    scores = engine.score([ScoreSequence(ids=tuple(ids), start=1)], 0.7).result(60)
    assert_close_to(scores.logprobs[0], reference(one, ids, 1, 0.7), 1e-3)
    futures = engine.generate([Call(p, Sampling(max_tokens=150, seed=i)) for i, p in enumerate(prompts(16))])
    wait_until(lambda: engine.status()["output_tokens"] > 200)
    engine.pause()
    engine.apply({name: (None, bits.reshape(-1)) for name, bits in state_of(two).items()}, Identity(1, 1))
    engine.resume()
    mixed = 0
    for asked, future in zip(prompts(16), futures, strict=True):
        made = future.result(120)
        for span in made.spans:
            folder = {"0@1": one, "1@1": two}[span.version]
            wanted = reference(folder, asked + made.output_ids, len(asked))[span.start : span.end]
            assert_close_to(made.logprobs[span.start : span.end], wanted, 1e-3)
        mixed += len(made.spans) == 2
    assert mixed
    waits = engine.generate([Call([5, 6], Sampling(max_tokens=250, temperature=0.01))] * 4)
    os.kill(on_workers(engine, lambda _: os.getpid())[1], signal.SIGKILL)
    for future in waits:
        with pytest.raises(StopError, match="vLLM stopped"):
            future.result(60)
    assert engine.failure


PARENT = """
import sys
from pathlib import Path
from inference_space.engines.vllm_core import prepare_environment
prepare_environment(threads=1, kv_cache_gib=1)
from inference_space.engines.vllm_engine import VllmEngine
from sync import Identity
engine = VllmEngine(max_slots=4, max_len=64, prefill_tokens=64, tensor_parallel=2)
engine.load(Path(sys.argv[1]), Identity(1, 0))
print("ready", flush=True)
sys.stdin.read()
"""


def children_of(pid: int) -> set[int]:
    """Every process below one, as /proc has it."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            except OSError:
                continue  # it just ended
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {pid}


@pytest.mark.parametrize("when", ["serving", "loading"])
def test_a_killed_space_leaves_no_worker(tmp_path: Path, when: str) -> None:
    folder = make_checkpoint(tmp_path / "c")
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, str(folder)], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as parent:
        try:
            assert parent.stdout is not None
            if when == "serving":
                assert parent.stdout.readline() == b"ready\n"
            wait_until(lambda: len(children_of(parent.pid)) >= 2, 200)
            children = children_of(parent.pid)
        finally:
            parent.kill()
    wait_until(lambda: not any(Path(f"/proc/{pid}/exe").exists() for pid in children), 60)
