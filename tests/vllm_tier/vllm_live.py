"""Checkpoints, edits and engines for the tests of the vLLM engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from support.devhub import ROOT
from support_tiny import make_checkpoint, make_tokenizer, state_of

State = dict[str, NDArray[Any]]
KINDS = ("qwen3-tied", "qwen3-untied", "llama")
CPU = {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1", "VLLM_PLUGINS": "", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo", "VLLM_HOST_IP": "127.0.0.1",
}  # fmt: skip


def checkpoint(kind: str, folder: Path, seed: int = 0) -> Path:
    """A tiny checkpoint of one of KINDS, or of a family with experts: qwen3-moe, gpt-oss."""
    if kind in ("llama", "qwen3-moe", "gpt-oss"):
        return _other(kind, folder, seed)
    return make_checkpoint(folder, seed, tied=kind == "qwen3-tied")


def _other(kind: str, folder: Path, seed: int) -> Path:
    import torch
    import transformers as hf

    tokenizer = make_tokenizer()
    common: dict[str, Any] = {
        "vocab_size": len(tokenizer), "num_hidden_layers": 2, "head_dim": 32, "max_position_embeddings": 4096,
        "tie_word_embeddings": False, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None,
        "pad_token_id": None, "initializer_range": 0.3,
    }  # fmt: skip
    made: Any
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        if kind == "llama":
            made = hf.LlamaForCausalLM(hf.LlamaConfig(
                hidden_size=96, intermediate_size=160, num_attention_heads=3, num_key_value_heads=3, **common
            ))  # fmt: skip
        elif kind == "qwen3-moe":
            made = hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(
                hidden_size=64, intermediate_size=128, moe_intermediate_size=64, num_attention_heads=2,
                num_key_value_heads=2, num_experts=4, num_experts_per_tok=2, decoder_sparse_step=1, **common
            ))  # fmt: skip
        else:
            made = hf.GptOssForCausalLM(hf.GptOssConfig(
                hidden_size=64, intermediate_size=128, num_attention_heads=2, num_key_value_heads=2,
                num_local_experts=4, num_experts_per_tok=2, **common
            ))  # fmt: skip
        made.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def edited(state: Mapping[str, NDArray[Any]], seed: int) -> State:
    """A copy with other mantissas: of few elements, of one in twenty, or of half, in some or all tensors."""
    rng = np.random.default_rng(seed)
    share = (0.002, 0.05, 0.5)[seed % 3]
    new = {name: array.copy() for name, array in state.items()}
    for name, array in new.items():
        if seed % 4 == 0 and rng.random() < 0.5 and "norm" not in name:
            continue
        flat = array.reshape(-1)
        at = np.flatnonzero(rng.random(flat.size) < share)
        flat[at] ^= rng.integers(1, 1 << 6, size=len(at), dtype=np.uint16)
    return new


def fresh(
    out: Path,
    folders: Sequence[Path],
    prompts: Sequence[Sequence[int]],
    tokens: int,
    ranks: int = 1,
    dtype: str = "auto",
) -> dict[str, Any]:
    """What plain vLLM in a process of its own says under each folder's weights, see fresh.py."""
    script = Path(__file__).with_name("fresh.py")
    command = [*map(str, [sys.executable, script, out, tokens, json.dumps(prompts), ranks, dtype, *folders])]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | CPU, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return dict(json.loads(out.read_bytes()))


def greedy(engine: Any, asked: Sequence[Sequence[int]], tokens: int) -> list[dict[str, Any]]:
    """One call after the other, as `fresh` asks; an answer that met the end token is compared as far as it goes."""
    from inference_space.engines.base import Call
    from sync.schema.calls import Sampling

    found = []
    for ids in asked:
        made = engine.generate([Call(ids, Sampling(max_tokens=tokens, temperature=0.0))])[0].result(60)
        found.append({"ids": made.output_ids, "logprobs": made.logprobs})
    return found


def noise(engine: Any, asked: Sequence[Sequence[int]], tokens: int) -> float:
    """How far the engine's own logprobs move with the shape of the batch: calls one by one, all at once, and all twice
    at once. Where a near tie gives other tokens, up to there."""
    from inference_space.engines.base import Call
    from sync.schema.calls import Sampling

    alone, worst = greedy(engine, asked, tokens), 0.0
    for times in 1, 2:
        calls = [Call(ids, Sampling(max_tokens=tokens, temperature=0.0)) for ids in asked] * times
        made = [future.result(60) for future in engine.generate(calls)]
        for one, many in zip(alone * times, made, strict=True):
            for token, other, p, q in zip(one["ids"], many.output_ids, one["logprobs"], many.logprobs, strict=False):
                if token != other:
                    break
                worst = max(worst, abs(p - q))
    return worst


def same(said: Sequence[dict[str, Any]], wanted: Sequence[dict[str, Any]], noise: float) -> bool:
    """Whether the tokens are equal, and the logprobs within eight times the noise: plain vLLM multiplies with packed
    kernels of its own, which differ in their last bits by processor. Compute in float32."""
    bound = 8 * max(noise, 1e-6)
    pairs = list(zip(said, cut(said, wanted), strict=True))
    near = [abs(a - b) <= bound for s, w in pairs for a, b in zip(s["logprobs"], w["logprobs"], strict=True)]
    return all(s["ids"] == w["ids"] for s, w in pairs) and all(near)


def cut(said: Sequence[dict[str, Any]], wanted: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """`wanted`, each answer as long as the one beside it."""
    return [{key: w[key][: len(s["ids"])] for key in w} for s, w in zip(said, wanted, strict=True)]


__all__ = ["CPU", "KINDS", "State", "checkpoint", "cut", "edited", "fresh", "greedy", "noise", "same", "state_of"]
