"""Pieces and segments: how the elements of a state are divided for work in parallel and for sums that can be audited.

A *piece* is a run of one tensor's flat elements, at most `MOST` of them. A *segment* is a list of pieces of one dtype
with at most `MOST` elements together: small tensors share one, a large tensor has several. Both follow from the schema
alone, so two ends that agree on it agree on them.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .tensors import Schema, TensorSpec, schema_digest

MOST = 1 << 22
_STEP = 1 << 12


class Piece(NamedTuple):
    """Elements start to stop of a tensor, flat."""

    name: str
    start: int
    stop: int

    @property
    def size(self) -> int:
        """Elements."""
        return self.stop - self.start


class Segment(NamedTuple):
    """Consecutive pieces, their numbers (`first`, `first` + 1, …) in `Layout.pieces`, their common dtype, where each
    ends in the segment, what to add to an index in the segment for one in the piece's tensor, how many elements that
    tensor has, and the elements in all."""

    first: int
    pieces: tuple[Piece, ...]
    dtype: str
    ends: NDArray[np.int64]
    offsets: NDArray[np.int64]
    tensors: NDArray[np.int64]
    size: int


class Layout(NamedTuple):
    """The pieces of a schema, its segments, and one segment per tensor whatever its size (`tensors`), all without empty
    tensors; and the schema's digest."""

    pieces: tuple[Piece, ...]
    segments: tuple[Segment, ...]
    tensors: tuple[Segment, ...]
    digest: str


def layout_of(schema: Schema) -> Layout:
    """The layout of a schema: ordered by (dtype, name), so that a segment has one dtype."""
    return _layout(tuple(schema.items()))


@lru_cache(maxsize=16)
def _layout(items: tuple[tuple[str, TensorSpec], ...]) -> Layout:
    schema = dict(items)
    pieces: list[Piece] = []
    segments: list[Segment] = []
    tensors: list[Segment] = []
    held, group_dtype = 0, ""
    group: list[Piece] = []
    for name, spec in sorted(items, key=lambda item: (item[1].dtype, item[0])):
        cut = _cut(name, spec.size)
        if cut:
            tensors.append(_segment(len(pieces), cut, schema))
        for piece in cut:
            if group and (spec.dtype != group_dtype or held + piece.size > MOST):
                segments.append(_segment(len(pieces) - len(group), group, schema))
                group = []
            held, group_dtype = (held if group else 0) + piece.size, spec.dtype
            group.append(piece)
            pieces.append(piece)
    if group:
        segments.append(_segment(len(pieces) - len(group), group, schema))
    return Layout(tuple(pieces), tuple(segments), tuple(tensors), schema_digest(schema))


def _segment(first: int, pieces: list[Piece], schema: Schema) -> Segment:
    ends = np.cumsum([piece.size for piece in pieces])
    offsets = np.array([piece.stop for piece in pieces]) - ends
    sizes = np.array([schema[piece.name].size for piece in pieces])
    return Segment(first, tuple(pieces), schema[pieces[0].name].dtype, ends, offsets, sizes, int(ends[-1]))


def _cut(name: str, size: int) -> list[Piece]:
    """A tensor in equal pieces, [] for an empty one."""
    parts = -(-size // MOST)
    step = size if parts <= 1 else -(-size // (parts * _STEP)) * _STEP
    return [Piece(name, at, min(at + step, size)) for at in range(0, size, step or 1)]
