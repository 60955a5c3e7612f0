"""Load checkpoint folders in plain vLLM, without a line of ours, and write what each says greedily.

    python fresh.py OUT TOKENS PROMPTS RANKS DTYPE FOLDER...

PROMPTS is JSON, lists of token ids, asked one after the other; RANKS workers share the model,
which computes in DTYPE. OUT becomes JSON:
folder name → [{ids, logprobs}].
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory


def says(folder: str, prompts: list[list[int]], tokens: int, ranks: int, dtype: str) -> list[dict[str, Any]]:
    """The greedy continuations under one folder's weights."""
    way = "uni" if ranks == 1 else "mp"
    parallel: dict[str, Any] = {"tensor_parallel_size": ranks, "distributed_executor_backend": way}
    llm = LLM(model=folder, dtype=dtype, enforce_eager=True, max_model_len=257, max_num_seqs=8, **parallel)
    greedy = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, logprobs=0, detokenize=False)
    found = []
    for ids in prompts:
        (answer,) = llm.generate([{"prompt_token_ids": ids}], greedy, use_tqdm=False)
        made = answer.outputs[0]
        steps = zip(made.token_ids, made.logprobs, strict=True)
        found.append({"ids": list(made.token_ids), "logprobs": [step[token].logprob for token, step in steps]})
    del llm
    gc.collect()
    cleanup_dist_env_and_memory()
    return found


if __name__ == "__main__":
    out, tokens, asked, ranks, dtype, *folders = sys.argv[1:]
    said = {Path(f).name: says(f, json.loads(asked), int(tokens), int(ranks), dtype) for f in folders}
    Path(out).write_text(json.dumps(said))
