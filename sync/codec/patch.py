"""What changed between two states, element by element, as bits."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import InvalidRequest
from ..pieces import MOST, Piece, Segment, layout_of
from ..tensors import Bits, Schema, State, bits
from ..threads import in_order

MAX_INT32 = 2**31
_WORDS = (np.dtype(np.uint64), np.dtype(np.uint32))
_KEPT = threading.local()


@dataclass(frozen=True, slots=True)
class TensorPatch:
    """Changed elements of one tensor: flat indices (int32 below 2^31 elements, else int64; strictly increasing) and
    the old and new bits there (unsigned, the tensor's width). Raises InvalidRequest when they are not as many."""

    index: NDArray[np.integer[Any]]
    old: Bits
    new: Bits

    def __post_init__(self) -> None:
        if not len(self.index) == len(self.old) == len(self.new):
            raise InvalidRequest(f"{len(self.index)} indices, {len(self.old)} old and {len(self.new)} new values")

    def within(self, piece: Piece) -> TensorPatch:
        """The part of the patch that lies in a piece of its tensor; indices stay those of the tensor."""
        first, last = np.searchsorted(self.index, [piece.start, piece.stop])
        return TensorPatch(self.index[first:last], self.old[first:last], self.new[first:last])


Patch = dict[str, TensorPatch]


def index_type(size: int) -> type[np.int32 | np.int64]:
    """The index dtype of a tensor with `size` elements."""
    return np.int32 if size < MAX_INT32 else np.int64


def diff(
    old: State, new: State, schema: Schema, ties: Mapping[str, str] | None = None, *, threads: int | None = None
) -> Patch:
    """Compare two states of one schema bit by bit; unchanged tensors and the aliases in `ties` are left out.

    NaN payloads and signed zeros count as bits: only identical bits are equal. threads: see `in_order`.
    """
    wanted = {name: spec for name, spec in schema.items() if not ties or name not in ties}
    return dict(changes(old, new, wanted, threads=threads))


def changes(old: State, new: State, schema: Schema, *, threads: int | None = None) -> Iterator[tuple[str, TensorPatch]]:
    """The tensors that differ, one at a time, see `diff`."""

    def compare(segment: Segment) -> list[tuple[str, TensorPatch]]:
        return [(piece.name, compared(old, new, schema, piece)) for piece in segment.pieces]

    name, parts = "", list[TensorPatch]()
    for found in in_order(compare, layout_of(schema).segments, threads):
        for here, patch in found:
            if here != name and parts:
                yield name, _joined(parts)
                parts = []
            name = here
            if len(patch.index):
                parts.append(patch)
    if parts:
        yield name, _joined(parts)


def _joined(parts: list[TensorPatch]) -> TensorPatch:
    if len(parts) == 1:
        return parts[0]
    return TensorPatch(*(np.concatenate([getattr(part, name) for part in parts]) for name in ("index", "old", "new")))


def compared(before: State, after: State, schema: Schema, piece: Piece) -> TensorPatch:
    """What differs in a piece of a tensor, found in one pass over both states."""
    from .. import kernels

    old = bits(before[piece.name])[piece.start : piece.stop]
    new = bits(after[piece.name])[piece.start : piece.stop]
    rooms, words = _rooms(index_type(schema[piece.name].size), old.dtype), _as_words(old, new)
    count = int(kernels.find_changes[words[0].itemsize // old.itemsize](*words, old, new, piece.start, *rooms))
    return TensorPatch(*(room[:count].copy() for room in rooms))


def _rooms(index: type[np.int32 | np.int64], bits: np.dtype[Any]) -> tuple[NDArray[Any], ...]:
    """Room for the changes of one piece, kept by each thread: fresh memory costs more than the comparison, and pages
    that are never reached cost nothing."""
    kept: dict[tuple[Any, ...], tuple[NDArray[Any], ...]] = _KEPT.__dict__.setdefault("rooms", {})
    if (index, bits) not in kept:
        kept[index, bits] = (np.empty(MOST + 1, index), np.empty(MOST + 1, bits), np.empty(MOST + 1, bits))
    return kept[index, bits]


def _as_words(one: Bits, other: Bits) -> tuple[Bits, Bits]:
    """Two arrays as the widest words that both are aligned for; the elements themselves where they are not."""
    from .. import kernels

    where = int(kernels.address(one)) | int(kernels.address(other))
    for word in _WORDS:
        size = word.itemsize
        if size > one.itemsize and not where % size:
            whole = len(one) * one.itemsize // size * (size // one.itemsize)
            return one[:whole].view(word), other[:whole].view(word)
    return one, other


def compose(first: TensorPatch, second: TensorPatch) -> TensorPatch:
    """One patch that does what `first` and then `second` do: the union of their places, the first old and the last new
    bits, without the places that returned to what they were."""
    from .. import kernels

    most = len(first.index) + len(second.index)
    index, old, new = (np.empty(most, a.dtype) for a in (first.index, first.old, first.new))
    count = kernels.merge(first.index, first.old, first.new, second.index, second.old, second.new, index, old, new)
    return TensorPatch(index[:count].copy(), old[:count].copy(), new[:count].copy())
