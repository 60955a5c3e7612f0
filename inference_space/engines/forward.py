"""The three passes over a model: prefill new rows, one decode step for all rows, teacher forcing.

The language model head runs only on the positions asked for: a hook selects them before the projection, so
that whatever the model does to logits afterwards (scaling, soft caps) still applies.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from .slots import SlotCache

Int64 = np.ndarray[Any, np.dtype[np.int64]]


class Passes:
    """A model with its slots. Methods return float32 logits [n, vocabulary]; call them from one thread."""

    def __init__(self, model: Any, slots: int, max_len: int) -> None:
        self.model = model
        self.device = next(model.parameters()).device
        self.vocabulary = int(model.get_input_embeddings().weight.shape[0])
        self.cache = SlotCache(model.config.get_text_config().num_hidden_layers, slots, max_len)
        renamed = "cache" in inspect.signature(model.forward).parameters  # transformers 5.24 renamed the argument
        self._cache_name = "cache" if renamed else "past_key_values"
        self._selected: tuple[torch.Tensor, torch.Tensor] | None = None
        model.get_output_embeddings().register_forward_pre_hook(self._select)

    def _select(self, _: Any, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...] | None:
        return None if self._selected is None else (args[0][self._selected][None],)

    def prefill(self, first: int, sequences: Sequence[Sequence[int]]) -> torch.Tensor:
        """Fill rows first.. with whole sequences; logits after the last token of each."""
        plan = self.cache.plan
        plan.first, plan.positions, plan.length = first, None, 0
        ends = np.array([len(ids) - 1 for ids in sequences])
        return self._whole(sequences, np.arange(len(sequences)), ends, {self._cache_name: self.cache})

    def score(self, sequences: Sequence[Sequence[int]], rows: Int64, positions: Int64) -> torch.Tensor:
        """Logits after token `positions[i]` of sequence `rows[i]`, without touching the slots."""
        return self._whole(sequences, rows, positions, {})

    def decode(self, tokens: Int64, positions: Int64) -> torch.Tensor:
        """Feed one token per row 0..n-1, at the position given for each row."""
        plan, n = self.cache.plan, len(tokens)
        plan.length = int(positions.max()) + 1
        plan.positions = self._device(positions)
        plan.rows = torch.arange(n, device=self.device)
        mask = torch.arange(plan.length, device=self.device)[None] <= plan.positions[:, None]
        self._selected = None
        return self._run(
            self._device(tokens)[:, None],
            plan.positions[:, None],
            mask[:, None, None],
            {self._cache_name: self.cache},
        )

    def _whole(
        self, sequences: Sequence[Sequence[int]], rows: Int64, positions: Int64, cache: dict[str, SlotCache]
    ) -> torch.Tensor:
        length = max(map(len, sequences))
        ids = np.zeros((len(sequences), length), dtype=np.int64)
        for row, sequence in enumerate(sequences):
            ids[row, : len(sequence)] = sequence
            ids[row, len(sequence) :] = sequence[-1]  # a token of its own: another's embedding may be NaN
        mask = torch.ones(length, length, dtype=torch.bool, device=self.device).tril_()
        places = torch.arange(length, device=self.device).expand(len(sequences), length)
        self._selected = self._device(rows), self._device(positions)
        return self._run(self._device(ids), places, mask[None, None], cache)

    def _run(
        self, ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor, cache: dict[str, SlotCache]
    ) -> torch.Tensor:
        out = self.model(input_ids=ids, position_ids=positions, attention_mask=mask, use_cache=bool(cache), **cache)
        logits: torch.Tensor = out.logits
        return logits.reshape(-1, logits.shape[-1]).float()

    def _device(self, array: Int64) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)
