"""TRL's own asynchronous rollout worker, unchanged, against `/v1/completions` of a Space that runs vLLM.

The worker sends no headers: the Space's token stands in the URL it is given.
"""

from __future__ import annotations

import importlib.util
import queue
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support_tiny import assert_close_to, make_checkpoint, publishing, reference, state_of, wait_until

from sync import open_store

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed here; run make test-vllm", allow_module_level=True)

from test_vllm_space import TOKEN, Run, space

# TRL's own modules warn while they are imported, and its worker process forks threads of its own
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300), pytest.mark.filterwarnings("default")]
GENERATIONS, PROMPTS = 4, 3


def rewarded(completions: list[Any], **_: Any) -> list[float]:
    """Longer answers get more; at module level, because the worker's process imports it."""
    return [float(len(str(completion))) for completion in completions]


def test_trls_worker_gets_exactly_what_vllm_sampled_before_and_after_an_update(tmp_path: Path) -> None:
    from accelerate import PartialState
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl.chat_template_utils import qwen3_chat_template
    from trl.experimental.async_grpo.async_rollout_worker import AsyncRolloutWorker

    PartialState()  # TRL's logger asks for it; the trainer makes one
    first = make_checkpoint(tmp_path / "first", tied=False)
    store = open_store(str(tmp_path / "run"), create=True, writable=True)
    tokenizer = AutoTokenizer.from_pretrained(first)
    tokenizer.chat_template = qwen3_chat_template  # TRL takes the templates it knows
    rows = [[{"role": "user", "content": f"Guess a number between {n} and 99."}] for n in range(PROMPTS)]
    with publishing(store, first) as publisher, space(tmp_path / "run", tmp_path) as serving:
        run = Run(tmp_path, publisher, state_of(first))
        wait_until(lambda: serving.http.get("/ready").status_code == 200, 120)
        worker = AsyncRolloutWorker(
            model_name="policy", dataset=Dataset.from_dict({"prompt": rows}), reward_funcs=[rewarded],
            processing_class=tokenizer, eos_token_ids=[tokenizer.eos_token_id], num_generations=GENERATIONS,
            max_inflight_tasks=8, queue_maxsize=64, vllm_server_url=f"{serving.url}/s/{TOKEN}", max_tokens=12,
            request_timeout=60,
        )  # fmt: skip
        worker.start()
        try:
            before = take(worker, 2 * GENERATIONS)
            moved = run.publish()
            serving.reach(moved)
            take(worker, 200)  # what was on the way when the weights changed
            after = take(worker, 2 * GENERATIONS)
            worker.check_health(120)
        finally:
            worker.stop()
        for samples, checkpoint in ((before, first), (after, run.checkpoint(moved))):
            assert len({sample.advantage for sample in samples}) > 1
            for sample in samples:
                ids, mask = sample.input_ids.tolist(), np.asarray(sample.completion_mask, bool)
                forced = np.array([0.0, *reference(checkpoint, ids, 1)])
                assert 0 < mask.sum() <= 12
                assert_close_to(sample.old_log_probs[mask].tolist(), forced[mask].tolist(), 2e-3)
        assert not close(before[0], run.checkpoint(moved)), "another version's logprobs would not be told apart"


def take(worker: Any, count: int) -> list[Any]:
    """The next `count` samples; raises what ended the worker."""
    found: list[Any] = []
    while len(found) < count:
        try:
            found.append(worker.rollout_buffer.get(timeout=90))
        except queue.Empty:
            worker.check_health(60)
            raise
    return found


def close(sample: Any, checkpoint: Path) -> bool:
    mask = np.asarray(sample.completion_mask, bool)
    forced = np.array([0.0, *reference(checkpoint, sample.input_ids.tolist(), 1)])
    return bool(np.abs(sample.old_log_probs[mask] - forced[mask]).max() < 2e-3)
