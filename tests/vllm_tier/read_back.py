"""Load checkpoint folders in vLLM, one after the other, and write down what each engine holds and what it says.

    python read_back.py OUT PROMPTS FOLDER...

PROMPTS is JSON, lists of token ids. For every FOLDER, OUT gets NAME.safetensors, the engine's weights under vLLM's own
names, and NAME.json, the greedy continuation of each prompt: {ids, logprobs}.
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.model_executor.layers.linear import LinearBase

GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, logprobs=0, detokenize=False)


def multiplied(layer: Any, width: int) -> torch.Tensor:
    """The matrix that a layer multiplies with. On a CPU vLLM packs it away and leaves an empty parameter (for an output
    matrix a copy), but rows of the identity bring its columns back, bit for bit."""
    columns: torch.Tensor = layer.quant_method.apply(layer, torch.eye(width, dtype=torch.bfloat16))
    return columns.T.contiguous()


@torch.inference_mode()
def held(model: Any) -> dict[str, torch.Tensor]:
    """Every parameter of a model under vLLM's names, matrices as they are multiplied with."""
    found = {name: p.detach().clone() for name, p in model.named_parameters() if p.numel()}
    layers = {n: m for n, m in model.named_modules() if isinstance(m, LinearBase)}
    found |= {f"{name}.weight": multiplied(layer, layer.input_size) for name, layer in layers.items()}
    found["lm_head.weight"] = multiplied(model.lm_head, model.lm_head.embedding_dim)
    return found


def read_back(folder: Path, prompts: list[list[int]], out: Path) -> None:
    """Load one folder, write its two files, and leave nothing of the engine behind."""
    llm = LLM(model=str(folder), enforce_eager=True, max_model_len=512, max_num_seqs=8)
    said = llm.generate([{"prompt_token_ids": ids} for ids in prompts], GREEDY, use_tqdm=False)
    (weights,) = llm.apply_model(held)
    del llm
    gc.collect()
    cleanup_dist_env_and_memory()
    save_file(weights, out / f"{folder.name}.safetensors")
    answers = []
    for one in (answer.outputs[0] for answer in said):
        steps = zip(one.token_ids, one.logprobs, strict=True)
        answers.append({"ids": list(one.token_ids), "logprobs": [step[token].logprob for token, step in steps]})
    (out / f"{folder.name}.json").write_text(json.dumps(answers))


if __name__ == "__main__":
    for path in sys.argv[3:]:
        read_back(Path(path), json.loads(sys.argv[2]), Path(sys.argv[1]))
