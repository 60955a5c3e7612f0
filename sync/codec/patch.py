"""What changed between two states, element by element, as bits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..tensors import Bits, Schema, State, bits

MAX_INT32 = 2**31


@dataclass(frozen=True, slots=True)
class TensorPatch:
    """Changed elements of one tensor: flat indices (int32 below 2^31 elements, else int64; strictly increasing) and
    the old and new bits there (unsigned, the tensor's width)."""

    index: NDArray[np.integer[Any]]
    old: Bits
    new: Bits


Patch = dict[str, TensorPatch]


def index_type(size: int) -> type[np.int32 | np.int64]:
    """The index dtype of a tensor with `size` elements."""
    return np.int32 if size < MAX_INT32 else np.int64


def diff(old: State, new: State, schema: Schema, ties: Mapping[str, str] | None = None) -> Patch:
    """Compare two states of one schema bit by bit; unchanged tensors and the aliases in `ties` are left out.

    NaN payloads and signed zeros count as bits: only identical bits are equal.
    """
    found: Patch = {}
    for name, spec in schema.items():
        if ties and name in ties:
            continue
        before, after = bits(old[name]), bits(new[name])
        changed: NDArray[np.bool_] = before != after
        index: NDArray[np.integer[Any]] = np.flatnonzero(changed).astype(index_type(spec.size), copy=False)
        if len(index):
            found[name] = TensorPatch(index, before[index], after[index])
    return found


def patched(base: Bits, patch: TensorPatch) -> Bits:
    """A copy of a tensor's flat bits with the patch applied."""
    out = base.copy()
    out[patch.index] = patch.new
    return out
