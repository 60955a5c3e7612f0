"""Every touch of TRL's private parts, in one place; `tests/unit/test_trl_contract.py` fails when TRL changes them.

Pinned to trl 1.16 (`trl.experimental.async_grpo`). What is done here and why:
- CPU shims: TRL's tree attention needs FlashAttention-3 and its FLOPs probe needs CUDA; without a CUDA device both are
  replaced by device-neutral forms before the trainer is built.
- Per-token advantages and token classes: TRL's sample has one float; the dataset and the collator are subclassed so
  that a float32 advantage and an int64 class per token reach the loss.
- Staleness: stale samples are dropped where the queue is read, so that the inbox hears of it and can ack the group.
"""

from __future__ import annotations

import os
import queue
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, TrainerCallback
from transformers.masking_utils import AttentionMaskInterface
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer
from trl.experimental.async_grpo import async_grpo_trainer as trl_module
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample
from trl.experimental.async_grpo.packing import TREE_ATTENTION
from trl.trainer.utils import pad

__all__ = ["AsyncGRPOConfig", "DeltawireTrainer", "RolloutSample", "install_cpu_shims", "tree_sdpa"]


def install_cpu_shims() -> bool:
    """Replace what needs CUDA when there is no CUDA device; returns True when they were installed."""
    if torch.cuda.is_available():
        return False
    AttentionInterface.register(TREE_ATTENTION, tree_sdpa)
    AttentionMaskInterface.register(TREE_ATTENTION, lambda **_: None)
    trl_module.register_tree_attention = lambda: None
    trl_module.get_peak_flops_per_device = lambda *_, **__: None
    return True


_mask_cache: tuple[torch.Tensor, torch.Tensor] | None = None


def _tree_mask(kv_index: torch.Tensor, cu_q: torch.Tensor, cu_k: torch.Tensor, total: int) -> torch.Tensor:
    """Boolean [total, total]: every segment of the trie sees its root-to-segment path, itself causally.

    Cached by the identity of `kv_index`: all layers of a forward pass share it.
    """
    global _mask_cache  # noqa: PLW0603 - one forward pass at a time
    if _mask_cache is not None and _mask_cache[0] is kv_index:
        return _mask_cache[1]
    mask = torch.zeros(total, total, dtype=torch.bool, device=kv_index.device)
    q_bounds, k_bounds = cu_q.tolist(), cu_k.tolist()
    for q0, q1, k0, k1 in zip(q_bounds[:-1], q_bounds[1:], k_bounds[:-1], k_bounds[1:], strict=True):
        mask[q0:q1, kv_index[k0:k1]] = True
        mask[q0:q1, q0:q1] = torch.ones(q1 - q0, q1 - q0, dtype=torch.bool, device=mask.device).tril()
    _mask_cache = (kv_index, mask)
    return mask


def tree_sdpa(
    module: Any,  # noqa: ARG001 - the signature of an attention function
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    attention_mask: torch.Tensor | None,  # noqa: ARG001
    *, tree_kv_index: torch.Tensor, tree_cu_seqlens_q: torch.Tensor, tree_cu_seqlens_k: torch.Tensor,
    scaling: float | None = None, **_: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Tree attention by dense masked SDPA: O(N²) in the row's unique tokens N, any device.

    query [1, heads, N, d], key and value [1, kv heads, N, d]; returns [1, N, heads, d].
    """
    mask = _tree_mask(tree_kv_index, tree_cu_seqlens_q, tree_cu_seqlens_k, query.shape[2])
    out = scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2), None


class _FreshQueue:
    """The inbox's queue without stale groups; remembers the last sample so that its token fields can follow it."""

    _REMEMBERED = 10_000

    def __init__(
        self, source: queue.Queue[Any], version: Callable[[], int], limit: int, on_stale: Callable[[str], None]
    ) -> None:
        self._source, self._version, self._limit, self._on_stale = source, version, limit, on_stale
        self._fresh: OrderedDict[str, bool] = OrderedDict()
        self.last: Any = None

    def get(self, timeout: float) -> Any:
        """The next sample that is young enough; raises queue.Empty at the deadline, whatever was dropped meanwhile."""
        give_up = time.monotonic() + timeout
        while (left := give_up - time.monotonic()) > 0:
            sample = self._source.get(timeout=left)
            if self._is_fresh(sample):
                self.last = sample
                return sample
            self._on_stale(sample.group)
        raise queue.Empty

    def _is_fresh(self, sample: Any) -> bool:
        """Decided at a group's first sample and kept for the others: a group is trained or dropped whole."""
        fresh = self._version() - sample.model_version <= self._limit
        if len(self._fresh) > self._REMEMBERED:
            self._fresh.popitem(last=False)
        return self._fresh.setdefault(sample.group, fresh)

    def qsize(self) -> int:
        return self._source.qsize()


class _TokenDataset(trl_module.RolloutQueueDataset):  # type: ignore[misc]
    def __iter__(self) -> Iterator[dict[str, Any]]:
        for row in super().__iter__():
            sample = self.queue.last
            yield row | {
                "token_advantages": sample.token_advantages,
                "token_class": sample.token_class,
                "group": sample.group,
            }


class _TokenCollator(trl_module.DataCollatorForRollout):  # type: ignore[misc]
    """Replaces the advantages by the per-token ones and adds `token_class`; notes each micro-batch's groups."""

    noted: deque[list[str]]

    def torch_call(self, examples: list[Any]) -> dict[str, Any]:
        batch: dict[str, Any] = super().torch_call(examples)
        (rows,) = examples
        advantages, classes = [], []
        for row in rows:
            picked = [(s, s["completion_mask"][1:] != 0) for s in row.samples]
            advantages.append(torch.cat([torch.from_numpy(s["token_advantages"][1:][m]) for s, m in picked]))
            classes.append(torch.cat([torch.from_numpy(s["token_class"][1:][m]) for s, m in picked]))
        batch["advantages"] = pad(advantages, padding_value=0)
        batch["token_class"] = pad(classes, padding_value=0)
        self.noted.append([sample["group"] for row in rows for sample in row.samples])
        return batch


class DeltawireTrainer(AsyncGRPOTrainer):  # type: ignore[misc]
    """AsyncGRPOTrainer with per-token advantages, our staleness rule, and word of what each step trained.

    on_stale(group) is called for each sample dropped for its age; on_trained(groups) after each optimizer step, with
    one name per sample. `recent_inputs` keeps the last `keep_inputs` micro-batches.
    """

    def __init__(
        self, *args: Any, max_age: int, on_stale: Callable[[str], None],
        on_trained: Callable[[list[str]], None], keep_inputs: int = 0, **kwargs: Any,
    ) -> None:  # fmt: skip
        self._max_age, self._on_stale, self._on_trained = max_age, on_stale, on_trained
        self._noted: deque[list[str]] = deque()
        self._in_step: list[str] = []
        self.recent_inputs: deque[dict[str, Any]] = deque(maxlen=keep_inputs)
        super().__init__(*args, **kwargs)
        self.add_callback(_TrainedCallback(self))

    def get_train_dataloader(self) -> Any:
        """TRL's loader over our dataset and collator."""
        source: Any = self.rollout_queue  # type: ignore[has-type]
        if source is not None:
            # accelerate fetches one batch ahead, so a sample is one sync older when it is trained than when it is read
            self.rollout_queue = _FreshQueue(source, lambda: self.model_version, self._max_age - 1, self._on_stale)
        try:
            with _substituted(self._noted):
                return super().get_train_dataloader()
        finally:
            self.rollout_queue = source

    def training_step(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any) -> Any:
        """One micro-batch, noting which groups it trains."""
        if self._noted:
            self._in_step += self._noted.popleft()
        self.recent_inputs.append(inputs)
        return super().training_step(model, inputs, num_items_in_batch)

    def _sync_weight(self) -> None:
        self.finish_step()  # so that the version names the harness of everything that was trained into it
        super()._sync_weight()

    def finish_step(self) -> None:
        """Tell the inbox what was trained since the last call."""
        groups, self._in_step = self._in_step, []
        self._on_trained(groups)


class _TrainedCallback(TrainerCallback):  # type: ignore[misc]
    def __init__(self, trainer: DeltawireTrainer) -> None:
        self._trainer = trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002 - TRL's signature
        self._trainer.finish_step()


@contextmanager
def _substituted(noted: deque[list[str]]) -> Iterator[None]:
    """While TRL builds its loader, its dataset and collator classes are ours."""

    def collator(*args: Any, **kwargs: Any) -> _TokenCollator:
        made = _TokenCollator(*args, **kwargs)
        made.noted = noted
        return made

    dataset, collate = trl_module.RolloutQueueDataset, trl_module.DataCollatorForRollout
    trl_module.RolloutQueueDataset, trl_module.DataCollatorForRollout = _TokenDataset, collator
    try:
        yield
    finally:
        trl_module.RolloutQueueDataset, trl_module.DataCollatorForRollout = dataset, collate
