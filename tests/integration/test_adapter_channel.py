"""An adapter channel followed by the torch engine: exact after every update, and clear about what it cannot serve."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from support.adapters import adapter_state, forced, make_adapter, publishing_adapter
from support.space import KEY, TOKEN
from support_tiny import assert_close_to, make_checkpoint, prompts, wait_until

from inference_space.engines.base import Call
from inference_space.engines.torch_engine import TorchEngine
from sync import Follower, MemoryStore, Stamp, open_store
from sync.errors import ConfigError, CorruptObject
from sync.layout import ADAPTER, ADAPTER_CONFIG
from sync.schema.base import Identity
from sync.schema.calls import Sampling, ScoreSequence
from sync.tools.checkout import checkout

pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),  # PEFT asks for it
]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("base") / "model", 0)


def engine_of(stack: ExitStack, base: Path | None) -> TorchEngine:
    engine = TorchEngine(max_slots=8, max_len=128, max_queued=64, adapter=True, base=base)
    stack.callback(engine.close)
    return engine


def sampled(engine: TorchEngine, tokens: int = 12) -> list[tuple[list[int], Any]]:
    asked = prompts(6, 1)
    futures = engine.generate([Call(ids, Sampling(max_tokens=tokens)) for ids in asked])
    return [(ids, future.result(60)) for ids, future in zip(asked, futures, strict=True)]


def test_every_version_is_exact_and_an_older_one_is_not(base: Path, tmp_path: Path) -> None:
    store = MemoryStore()
    adapters = [make_adapter(base, tmp_path / f"a{seed}", seed) for seed in range(3)]
    with ExitStack() as stack:
        publisher = stack.enter_context(publishing_adapter(store, adapters[0]))
        engine = engine_of(stack, base)
        follower = Follower(store, tmp_path / "mirror", engine, channel="adapter")
        stack.callback(follower.close)
        for version, folder in enumerate(adapters):
            if version:
                publisher.flush(adapter_state(folder), Stamp(step=version, sync=version))
            assert follower.poll()
            (kept,) = (tmp_path / "mirror").glob("g-*")
            assert {p.name for p in kept.iterdir()} == {ADAPTER, ADAPTER_CONFIG}
            checked = checkout(store, str(version), tmp_path / f"checked-{version}", channel="adapter")
            assert checked
            for ids, made in sampled(engine):
                assert [span.version for span in made.spans] == [f"{version}@1"]
                whole = ids + made.output_ids
                assert_close_to(made.logprobs, forced(base, tmp_path / f"checked-{version}", whole, len(ids)))
                other = forced(base, adapters[version - 1], whole, len(ids))
                assert np.abs(np.array(other) - made.logprobs).max() > 1e-2
            ids = prompts(1, 7)[0] + [5, 6]
            scores = engine.score([ScoreSequence(ids=tuple(ids), start=1)], 1.0).result(60)
            assert scores.identity == Identity(1, version)
            assert_close_to(scores.logprobs[0], forced(base, folder, ids, 1))


def test_calls_under_way_go_on_under_the_new_adapter(base: Path, tmp_path: Path) -> None:
    store = MemoryStore()
    adapters = [make_adapter(base, tmp_path / f"a{seed}", seed) for seed in range(2)]
    with ExitStack() as stack:
        publisher = stack.enter_context(publishing_adapter(store, adapters[0]))
        engine = engine_of(stack, base)
        follower = Follower(store, tmp_path / "mirror", engine, channel="adapter")
        stack.callback(follower.close)
        follower.poll()
        asked = prompts(8, 3)
        futures = engine.generate([Call(ids[:20], Sampling(max_tokens=100)) for ids in asked])
        wait_until(lambda: int(engine.status()["output_tokens"]) > 8)
        engine.pause()
        publisher.flush(adapter_state(adapters[1]), Stamp(step=1, sync=1))
        follower.poll()
        seen = set()
        for ids, future in zip(asked, futures, strict=True):
            made = future.result(60)
            whole = ids[:20] + made.output_ids
            for span in made.spans:
                seen.add(span.version)
                folder = adapters[int(span.version[0])]
                start = len(ids[:20])
                wanted = forced(base, folder, whole[: start + span.end], start + span.start)
                assert_close_to(made.logprobs[span.start : span.end], wanted)
        assert seen == {"0@1", "1@1"}


def test_the_base_is_the_one_that_the_configuration_names(base: Path, tmp_path: Path) -> None:
    with ExitStack() as stack:
        engine = engine_of(stack, None)
        engine.load(make_adapter(base, tmp_path / "adapter"), Identity(1, 0))
        engine.resume()
        assert sampled(engine)


def broken(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        path = folder / ADAPTER_CONFIG
        settings = json.loads(path.read_text())
        change(settings)
        path.write_text(json.dumps(settings))

    return spoil


def cut_short(path: Path) -> None:
    path.write_text("{")


BROKEN: dict[str, tuple[Callable[[Path], None], type[Exception], str]] = {
    "DoRA": (broken(lambda s: s.update(use_dora=True)), ConfigError, "use_dora"),
    "whole modules": (broken(lambda s: s.update(modules_to_save=["lm_head"])), ConfigError, "modules_to_save"),
    "biases": (broken(lambda s: s.update(bias="all")), ConfigError, "bias"),
    "another method": (broken(lambda s: s.update(peft_type="IA3")), ConfigError, "IA3"),
    "targets the base lacks": (broken(lambda s: s.update(target_modules=["nowhere"])), ConfigError, "PEFT"),
    "another rank": (broken(lambda s: s.update(r=8)), ConfigError, "is it the base"),
    "more targets": (broken(lambda s: s["target_modules"].append("k_proj")), ConfigError, "lacks"),
    "no configuration": (lambda folder: (folder / ADAPTER_CONFIG).unlink(), CorruptObject, "none to read"),
    "no JSON": (lambda folder: cut_short(folder / ADAPTER_CONFIG), CorruptObject, "not JSON"),
    "no tensors": (lambda folder: (folder / ADAPTER).unlink(), CorruptObject, "safetensors"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_what_cannot_be_served_is_refused_by_name_and_the_old_one_stays(base: Path, tmp_path: Path, kind: str) -> None:
    spoil, error, words = BROKEN[kind]
    good = make_adapter(base, tmp_path / "good")
    bad = make_adapter(base, tmp_path / "bad", 1)
    spoil(bad)
    with ExitStack() as stack:
        engine = engine_of(stack, base)
        engine.load(good, Identity(1, 0))
        engine.resume()
        with pytest.raises(error, match=words):
            engine.load(bad, Identity(1, 1))
        engine.load(good, Identity(1, 2))
        engine.resume()
        for ids, made in sampled(engine):
            assert_close_to(made.logprobs, forced(base, good, ids + made.output_ids, len(ids)))


def test_a_base_that_is_not_there_is_named(base: Path, tmp_path: Path) -> None:
    adapter = make_adapter(base, tmp_path / "adapter")
    with ExitStack() as stack:
        with pytest.raises(ConfigError, match="no model is there"):
            engine_of(stack, tmp_path / "nowhere").load(adapter, Identity(1, 0))
        wider = make_checkpoint(tmp_path / "wide", 0, hidden_size=96)
        with pytest.raises(ConfigError, match="is it the base"):
            engine_of(stack, wider).load(adapter, Identity(1, 0))


def test_the_command_follows_an_adapter_channel_and_says_what_it_lacks(base: Path, tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "run"), create=True, writable=True)
    adapter = make_adapter(base, tmp_path / "adapter")
    ready = tmp_path / "ready.json"
    words = ["--run", tmp_path / "run", "--folder", tmp_path / "mirror", "--base", base, "--ready-file", ready]
    command = [sys.executable, "-m", "deltawire", "inference", *map(str, words)]
    environ = {**os.environ, "DELTAWIRE_TOKEN": TOKEN, "OMP_NUM_THREADS": "1"}
    refused = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120, check=False)
    assert refused.returncode == 2
    assert "only an adapter has one" in refused.stderr
    with publishing_adapter(store, adapter), subprocess.Popen([*command, "--channel", "adapter"], env=environ) as child:
        try:
            wait_until(lambda: ready.exists() or child.poll() is not None, 120)
            with httpx.Client(base_url=json.loads(ready.read_text())["url"], headers=KEY, timeout=60) as http:
                wait_until(lambda: http.get("/ready").status_code == 200, 120)
                ids = prompts(1, 2)[0] + [5, 6]
                scored = http.post("/v1/score", json={"sequences": [{"ids": ids, "start": 1}]}).json()
            assert scored["version"] == "0@1"
            assert_close_to(scored["logprobs"][0], forced(base, adapter, ids, 1))
        finally:
            child.terminate()
            assert child.wait(60) == 0
