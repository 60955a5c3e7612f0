"""The state digest: a sum of keyed 64-bit mixes over elements, so that it is order-free and shard-additive.

For tensor key k, flat index i in the unsharded checkpoint tensor and element bits b,

    mix(k, i, b) = F(F(i·G + k) + b·M)   mod 2^64

with F the finalizer of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014).
The digest is the sum over all elements of all canonical tensors, plus one term per tensor for its name, dtype and
shape, under two independent keys (128 bits), mod 2^64 each. A change of an element updates it by
-mix(old) + mix(new). It guards against accidents, not against adversaries: sha256 of every object guards transfer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .pieces import Segment, layout_of
from .tensors import Bits, Schema, State, TensorSpec, bits, schema_of
from .threads import in_order

PREFIX = "sd1:"
_MASK = (1 << 64) - 1


class Sums(NamedTuple):
    """Two sums mod 2^64, one per key."""

    a: int
    b: int

    def plus(self, other: Sums) -> Sums:
        """Element-wise sum mod 2^64."""
        return Sums((self.a + other.a) & _MASK, (self.b + other.b) & _MASK)

    def minus(self, other: Sums) -> Sums:
        """Element-wise difference mod 2^64."""
        return Sums((self.a - other.a) & _MASK, (self.b - other.b) & _MASK)

    def text(self) -> str:
        """The digest as it stands in manifests."""
        return f"{PREFIX}{self.a:016x}{self.b:016x}"

    @classmethod
    def parse(cls, text: str) -> Sums:
        """Inverse of `text`; raises ValueError for anything else."""
        if not text.startswith(PREFIX) or len(text) != len(PREFIX) + 32:
            raise ValueError(f"{text!r} is not a state digest")
        return cls(int(text[4:20], 16), int(text[20:], 16))


ZERO = Sums(0, 0)


@cache
def _keys(name: str) -> tuple[np.uint64, np.uint64]:
    raw = hashlib.blake2b(name.encode(), digest_size=16, person=b"deltawire-sd1").digest()
    return np.uint64(int.from_bytes(raw[:8], "little")), np.uint64(int.from_bytes(raw[8:], "little"))


def tensor_term(name: str, spec: TensorSpec) -> Sums:
    """The term of one tensor's name, dtype and shape."""
    text = f"{name}\0{spec.dtype}\0{','.join(map(str, spec.shape))}"
    raw = hashlib.blake2b(text.encode(), digest_size=16, person=b"deltawire-sd1-t").digest()
    return Sums(int.from_bytes(raw[:8], "little"), int.from_bytes(raw[8:], "little"))


def element_sums(name: str, index: NDArray[np.integer] | None, values: Bits, *, start: int = 0) -> Sums:
    """Sum of mixes of `values` (unsigned bits) at flat `index`; index None means start, start+1, …

    Needs no memory of its own. Same result for any order of the elements.
    """
    from . import kernels

    keys = _keys(name)
    if index is None:
        found = kernels.dense_sums(np.uint64(start), values, *keys)
    else:
        found = kernels.sparse_sums(index, values, *keys)
    return Sums(int(found[0]), int(found[1]))


def change_sums(name: str, index: NDArray[np.integer], old: Bits, new: Bits) -> tuple[Sums, Sums]:
    """`element_sums` of the old and of the new bits at the same places, in one pass."""
    from . import kernels

    found = kernels.change_sums(index, old, new, *_keys(name))
    return Sums(int(found[0]), int(found[1])), Sums(int(found[2]), int(found[3]))


def change_sums_of(
    names: Sequence[str], cuts: NDArray[np.int64], index: NDArray[np.integer], old: Bits, new: Bits
) -> NDArray[np.uint64]:
    """`change_sums` of several tensors' parts of the same arrays, the k-th from cuts[k] to cuts[k + 1]:
    [len(names), 4], old a, old b, new a, new b."""
    from . import kernels

    keys = np.array([_keys(name) for name in names], np.uint64).reshape(-1, 2)
    out = np.empty((len(names), 4), np.uint64)
    kernels.change_sums_of(index, old, new, cuts, keys, out)
    return out


PieceSums: TypeAlias = NDArray[np.uint64]
"""[P, 2]: for each piece of a schema's layout (`sync/pieces.py`) the sums of its elements, or what to add to them; mod
2^64, as numpy's uint64 counts. What lets an audit read a part of a state at a time."""


def piece_sums(state: State, schema: Schema, *, threads: int | None = None) -> PieceSums:
    """The sums of every piece of a state."""

    def of(segment: Segment) -> list[Sums]:
        return [
            element_sums(p.name, None, bits(state[p.name])[p.start : p.stop], start=p.start) for p in segment.pieces
        ]

    found = in_order(of, layout_of(schema).segments, threads)
    return np.array([sums for part in found for sums in part], np.uint64).reshape(-1, 2)


def total(sums: PieceSums, schema: Schema) -> Sums:
    """A state's digest as sums, from those of its pieces: they and one term per tensor."""
    found = moved(ZERO, sums)
    for name, spec in schema.items():
        found = found.plus(tensor_term(name, spec))
    return found


def moved(sums: Sums, change: PieceSums) -> Sums:
    """A state's digest after a change of its pieces."""
    return sums.plus(Sums(*(int(n) for n in change.sum(axis=0, dtype=np.uint64))))


def state_sums(state: State, schema: Schema, *, threads: int | None = None) -> Sums:
    """The full digest of a state as sums: every element and one term per tensor."""
    return total(piece_sums(state, schema, threads=threads), schema)


def state_digest(state: State, schema: Schema | None = None, *, threads: int | None = None) -> str:
    """The digest of a complete state, as text. See the module's docstring; raises what `schema_of` raises. threads: see
    `sync/threads.py`."""
    return state_sums(state, schema_of(state, schema), threads=threads).text()
