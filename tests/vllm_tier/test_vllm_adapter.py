"""An adapter channel followed by the vLLM engine, through vLLM's own loading: exact, and not for the version beside it.

PEFT is not installed here; adapters are written in its format, and compared with their merged model in transformers.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed here; run make test-vllm", allow_module_level=True)

from support_tiny import assert_close_to, make_checkpoint, prompts, state_of, wait_until

from inference_space.engines.base import Call
from inference_space.engines.vllm_core import prepare_environment
from sync import Follower, Identity, Publisher, Stamp, open_store
from sync.errors import ConfigError, EngineFailed
from sync.layout import ADAPTER, ADAPTER_CONFIG
from sync.safetensors_io import MappedCheckpoint, write_checkpoint
from sync.schema.calls import Sampling, ScoreSequence
from sync.tensors import TensorSpec
from sync.tools.checkout import checkout

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(240), pytest.mark.filterwarnings("ignore")]
TARGETS = ("self_attn.q_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj")
RANK = 4
Make = Callable[..., Any]


def make_adapter(base: Path, folder: Path, seed: int, alpha: int = 8, **settings: Any) -> Path:
    """A random adapter over some of the projections of every layer, in bfloat16."""
    rng = torch.Generator().manual_seed(seed)
    state, schema = {}, {}
    shapes = {n: s.shape for n, s in MappedCheckpoint(base).schema.items()}
    for name, shape in shapes.items():
        if any(name.endswith(f"{target}.weight") for target in TARGETS):
            stem = f"base_model.model.{name.removesuffix('.weight')}"
            for half, size in (("A", (RANK, shape[1])), ("B", (shape[0], RANK))):
                values = (torch.randn(size, generator=rng) * 0.15).to(torch.bfloat16)
                state[f"{stem}.lora_{half}.weight"] = values.view(torch.int16).numpy().view(np.uint16)
                schema[f"{stem}.lora_{half}.weight"] = TensorSpec("BF16", size)
    folder.mkdir()
    write_checkpoint(folder, state, schema, file=ADAPTER)
    targets = [target.rpartition(".")[2] for target in TARGETS]
    config = {"peft_type": "LORA", "base_model_name_or_path": str(base), "r": RANK, "lora_alpha": alpha}
    config |= {"target_modules": targets, "bias": "none", "task_type": "CAUSAL_LM"} | settings
    (folder / ADAPTER_CONFIG).write_text(json.dumps(config))
    return folder


def bits_of(folder: Path) -> dict[str, Any]:
    return {name: np.array(bits) for name, bits in MappedCheckpoint(folder).state.items()}


def merged(base: Path, folder: Path) -> Any:
    """The model with the adapter's product added to its weights, in float32."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    settings = json.loads((folder / ADAPTER_CONFIG).read_text())
    values = {
        name: torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).float()
        for name, bits in bits_of(folder).items()
    }
    held = dict(model.named_parameters())
    with torch.no_grad():
        for name in {n.partition(".lora_")[0] for n in values}:
            product = values[f"{name}.lora_B.weight"] @ values[f"{name}.lora_A.weight"]
            held[f"{name.removeprefix('base_model.model.')}.weight"] += product * settings["lora_alpha"] / settings["r"]
    return model


def forced(model: Any, ids: Sequence[int], start: int) -> list[float]:
    wanted = torch.tensor(list(ids))
    with torch.inference_mode():
        logprobs = torch.log_softmax(model(wanted[None]).logits[0, :-1], -1)
    found: list[float] = logprobs.gather(1, wanted[1:, None])[start - 1 :, 0].tolist()
    return found


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("base") / "model", 0, tied=False)


@pytest.fixture
def make(base: Path) -> Iterator[Make]:
    prepare_environment(threads=1, kv_cache_gib=1)
    from inference_space.engines.vllm_engine import VllmEngine

    engines = []

    def build(**settings: Any) -> VllmEngine:
        limits: dict[str, Any] = {"max_slots": 8, "max_len": 256, "prefill_tokens": 256, "dtype": "float32"}
        engines.append(VllmEngine(**(limits | {"adapter": True, "base": base} | settings)))
        return engines[-1]

    yield build
    for engine in engines:
        engine.close()


def test_every_version_is_exact_and_the_one_beside_it_is_not(base: Path, make: Make, tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "run"), create=True, writable=True)
    adapters = [make_adapter(base, tmp_path / f"a{seed}", seed) for seed in range(3)]
    models = [merged(base, folder) for folder in adapters]
    files = {ADAPTER_CONFIG: (adapters[0] / ADAPTER_CONFIG).read_bytes()}
    publisher = Publisher(store, channel="adapter", side_files=files)
    publisher.open(bits_of(adapters[0]), Stamp(0, 0))
    engine = make()
    follower = Follower(store, tmp_path / "mirror", engine, channel="adapter")
    running: list[Any] = []
    for version, model in enumerate(models):
        if version:
            begun = [ids[:9] for ids in prompts(8, 5)]
            running = engine.generate([Call(ids, Sampling(max_tokens=200)) for ids in begun])
            before = int(engine.status()["output_tokens"])
            wait_until(lambda before=before: int(engine.status()["output_tokens"]) > before + 4)  # type: ignore[misc]
            engine.pause()
            running = [(ids, call) for ids, call in zip(begun, running, strict=True) if not call.done()]
            assert running
            publisher.flush(bits_of(adapters[version]), Stamp(version, version))
        assert follower.poll()
        assert set(engine.ways().values()) == {"adapter"}
        for _, future in running:  # went on under the new adapter, all keys computed again
            made = future.result(60)
            assert made.spans[-1].version == f"{version}@1"
        asked = prompts(5, version)
        futures = engine.generate([Call(ids, Sampling(max_tokens=10)) for ids in asked])
        for ids, future in zip(asked, futures, strict=True):
            made = future.result(60)
            assert [span.version for span in made.spans] == [f"{version}@1"]
            whole = ids + made.output_ids
            assert_close_to(made.logprobs, forced(model, whole, len(ids)), 2e-3)
            other = forced(models[version - 1], whole, len(ids))
            assert np.abs(np.array(other) - made.logprobs).max() > 2e-2
        read = (*prompts(1, 7)[0], 5, 6)
        scores = engine.score([ScoreSequence(ids=read, start=1)], 1.0).result(60)
        assert scores.identity == Identity(1, version)
        assert_close_to(scores.logprobs[0], forced(model, read, 1), 2e-3)
    for ids, future in running:
        made = future.result(60)
        for span in made.spans:
            whole = ids + made.output_ids[: span.end]
            wanted = forced(models[int(span.version[0])], whole, len(ids) + span.start)
            assert_close_to(made.logprobs[span.start : span.end], wanted, 2e-3)
    publisher.close()
    follower.close()
    checkout(store, "2", tmp_path / "checked", channel="adapter")
    asked = prompts(3, 11)
    said = []
    for one in (engine, make()):
        if one is not engine:
            one.load(tmp_path / "checked", Identity(1, 2))
            one.resume()
        futures = one.generate([Call(ids, Sampling(max_tokens=12, temperature=0)) for ids in asked])
        said.append([future.result(60) for future in futures])
    for one, fresh in zip(*said, strict=True):
        assert one.output_ids == fresh.output_ids
        assert_close_to(one.logprobs, fresh.logprobs, 1e-4)


def test_a_scaling_that_rounds_is_compared_as_vllm_applies_it(base: Path, make: Make, tmp_path: Path) -> None:
    folder = make_adapter(base, tmp_path / "adapter", 1, alpha=10)
    engine = make(dtype="bfloat16")
    engine.load(folder, Identity(1, 0))
    bits = bits_of(folder)
    for name in bits:
        assert np.array_equal(engine.read(name, None), bits[name].reshape(-1))
    name = next(n for n in bits if "lora_B" in n)
    engine._weights.core.call("adapted", name, bits[name].shape)[0][0].add_(1)
    with pytest.raises(EngineFailed, match="other values"):
        engine.read(name, np.array([0]))


def test_what_vllm_cannot_hold_is_refused_by_name(base: Path, make: Make, tmp_path: Path) -> None:
    engine = make()
    for number, (settings, words) in enumerate(
        [({"use_dora": True}, "use_dora"), ({"r": 600}, "rank 600"), ({"peft_type": "IA3"}, "IA3")]
    ):
        folder = make_adapter(base, tmp_path / f"bad{number}", 0, **settings)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=words):
            engine.load(folder, Identity(1, 0))
    with pytest.raises(ConfigError, match="one worker"):
        make(tensor_parallel=2)
    assert state_of(base)
