"""The KV cache of the torch engine: one preallocated row per running sequence, each at its own length."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import Cache, CacheLayerMixin


@dataclass
class Plan:
    """Where the pass under way writes: rows [first, first + n).

    `positions` None is a prefill: all rows write from position 0 on and attend to nothing older. Else it is a
    decode step: row i writes position `positions[i]` (int64 [n]) and attends to positions below `length`.
    """

    first: int = 0
    positions: torch.Tensor | None = None
    rows: torch.Tensor | None = None
    length: int = 0
    high: int = 0
    """longest position written since the last `clear`"""


class SlotLayer(CacheLayerMixin):  # type: ignore[misc]
    """Keys and values [slots, kv_heads, max_len, head_dim] of one layer, allocated at the first pass."""

    is_sliding = False

    def __init__(self, plan: Plan, slots: int, max_len: int) -> None:
        super().__init__()
        self.plan = plan
        self.slots = slots
        self.max_len = max_len

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate zeros: whatever a masked position holds must be finite, since 0 × NaN is NaN."""
        self.keys = self._zeros(key_states)
        self.values = self._zeros(value_states)
        self.is_initialized = True

    def _zeros(self, like: torch.Tensor) -> torch.Tensor:
        _, heads, _, dim = like.shape
        return torch.zeros(self.slots, heads, self.max_len, dim, dtype=like.dtype, device=like.device)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write what the plan says; return what the pass attends to, as views where possible."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        plan, n = self.plan, len(key_states)
        if plan.positions is None:
            length = key_states.shape[2]
            plan.high = max(plan.high, length)
            self.keys[plan.first : plan.first + n, :, :length] = key_states
            self.values[plan.first : plan.first + n, :, :length] = value_states
            return key_states, value_states
        plan.high = max(plan.high, plan.length)
        self.keys[plan.rows, :, plan.positions] = key_states[:, :, 0]
        self.values[plan.rows, :, plan.positions] = value_states[:, :, 0]
        return self.keys[:n, :, : plan.length], self.values[:n, :, : plan.length]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Not asked for: the engine passes finished masks."""
        return self.plan.length or query_length, 0

    def get_seq_length(self) -> int:
        """Longest length the present pass sees."""
        return self.plan.length

    def get_max_length(self) -> int:
        """Positions per row."""
        return self.max_len


class SlotCache(Cache):  # type: ignore[misc]
    """All layers' slots. Rows 0..n-1 are the running sequences; `keep` closes the holes of others."""

    def __init__(self, layers: int, slots: int, max_len: int) -> None:
        self.plan = Plan()
        super().__init__(layers=[SlotLayer(self.plan, slots, max_len) for _ in range(layers)])

    def keep(self, rows: np.ndarray[Any, Any], length: int) -> None:
        """Move rows `rows` (strictly increasing) to 0..len(rows)-1; only positions below `length` matter."""
        moved = np.flatnonzero(rows != np.arange(len(rows)))
        if not moved.size:
            return
        target, source = torch.from_numpy(moved), torch.from_numpy(rows[moved])
        for layer in self.layers:
            for data in (layer.keys, layer.values):
                data[target.to(data.device), :, :length] = data[source.to(data.device), :, :length]

    def wipe(self, rows: np.ndarray[Any, Any]) -> None:
        """Forget the values of rows that met NaN: it would reach whoever gets the slot, through masked positions."""
        for layer in self.layers:
            for data in (layer.keys, layer.values):
                data[torch.from_numpy(rows).to(data.device), :, : self.plan.high] = 0

    def clear(self) -> None:
        """Forget every value, so that nothing computed with older weights (NaN included) is left."""
        for layer in self.layers:
            if layer.is_initialized:
                layer.keys[:, :, : self.plan.high].zero_()
                layer.values[:, :, : self.plan.high].zero_()
        self.plan.high = 0
