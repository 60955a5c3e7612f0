"""What lies in a bucket, and what `deltawire checkout` writes, are ordinary checkpoints: vLLM loads them as they are.

Needs vLLM's build for CPUs, which has an environment of its own: `make test-vllm`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.checkpoints import CASES, Case, State, as_loaded, assert_same_bits, assert_transformers_loads, bring_all
from support.devhub import ROOT, HubProcess
from support_tiny import prompts, reference

from sync.safetensors_io import MappedState

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed here; run make test-vllm", allow_module_level=True)

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
PROMPTS = prompts(6)
CPU = {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1", "VLLM_PLUGINS": "", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
}  # fmt: skip


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    home = tmp_path_factory.mktemp("checkpoints")
    with pytest.MonkeyPatch.context() as patch, HubProcess(home / "server") as hub:
        patch.setenv("HF_HOME", str(home / "publisher"))
        return bring_all(hub, home)


@pytest.fixture(scope="module")
def engines(cases: dict[str, Case], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where vLLM, in a process of its own, wrote what it holds and says of every case."""
    out = tmp_path_factory.mktemp("engines")
    script = Path(__file__).with_name("read_back.py")
    command = [*map(str, [sys.executable, script, out, json.dumps(PROMPTS), *(c.folder for c in cases.values())])]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | CPU, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return out


def answers(engines: Path, name: str) -> list[dict[str, Any]]:
    return list(json.loads((engines / f"{name}.json").read_bytes()))


def unpacked(held: Mapping[str, Any], folder: Path) -> State:
    """vLLM's weights under the checkpoint's names: it keeps q, k and v in one matrix, gate and up in another, and
    rows of zeros after the vocabulary."""
    config = json.loads((folder / "config.json").read_bytes())
    q, kv = (config[key] * config["head_dim"] for key in ("num_attention_heads", "num_key_value_heads"))
    width, words = config["intermediate_size"], config["vocab_size"]
    parts = {
        "qkv_proj": {"q_proj": q, "k_proj": kv, "v_proj": kv},
        "gate_up_proj": {"gate_proj": width, "up_proj": width},
    }
    found: State = {}
    for name, array in held.items():
        packed = name.split(".")[-2]
        if packed in parts:
            pieces = np.split(array, np.cumsum([*parts[packed].values()]))
            assert pieces.pop().size == 0
            found |= {name.replace(packed, part): piece for part, piece in zip(parts[packed], pieces, strict=True)}
        elif packed in ("embed_tokens", "lm_head"):
            assert not array[words:].any()
            found[name] = array[:words]
        else:
            found[name] = array
    return found


@pytest.mark.parametrize("name", CASES)
def test_transformers_of_this_environment_loads_every_version(cases: dict[str, Case], name: str) -> None:
    assert_transformers_loads(cases[name])


@pytest.mark.parametrize("name", CASES)
def test_vllm_holds_every_tensor_bit_for_bit(cases: dict[str, Case], engines: Path, name: str) -> None:
    held = MappedState(engines / f"{name}.safetensors").state
    assert_same_bits(unpacked(held, cases[name].folder), as_loaded(cases[name]))


@pytest.mark.parametrize("name", CASES)
def test_vllm_says_what_this_version_says(cases: dict[str, Case], engines: Path, name: str) -> None:
    """Its logprobs are those of transformers (in float32: bf16 arithmetic is between them), and of no other version."""
    error = {}
    for other, case in cases.items():
        pairs = zip(PROMPTS, answers(engines, name), strict=True)
        wanted = [reference(case.folder, [*prompt, *said["ids"]], len(prompt)) for prompt, said in pairs]
        found = [said["logprobs"] for said in answers(engines, name)]
        error[other] = float(np.abs(np.array(found) - np.array(wanted)).max())
    assert error.pop(name) < 0.5
    assert min(error.values()) > 2.0
