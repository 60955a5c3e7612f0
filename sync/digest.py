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
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .tensors import Bits, Schema, State, TensorSpec, bits, schema_of

PREFIX = "sd1:"
CHUNK = 1 << 20
_MASK = (1 << 64) - 1
_G = np.uint64(0x9E3779B97F4A7C15)
_M = np.uint64(0xD6E8FEB86659FD93)
_C1 = np.uint64(0xBF58476D1CE4E5B9)
_C2 = np.uint64(0x94D049BB133111EB)


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


def _finalize(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x ^= x >> np.uint64(30)
    x *= _C1
    x ^= x >> np.uint64(27)
    x *= _C2
    x ^= x >> np.uint64(31)
    return x


def element_sums(name: str, index: NDArray[np.integer] | None, values: Bits, *, start: int = 0) -> Sums:
    """Sum of mixes of `values` (unsigned bits) at flat `index`; index None means start, start+1, …

    Works in chunks of 1 M elements, so the extra memory is bounded. Same result for any order of the elements.
    """
    total = ZERO
    for at in range(0, len(values), CHUNK):
        chunk = values[at : at + CHUNK].astype(np.uint64)
        chunk *= _M
        if index is None:
            where = np.arange(start + at, start + at + len(chunk), dtype=np.uint64)
        else:
            where = index[at : at + CHUNK].astype(np.uint64)
        where *= _G
        sums = [int(_finalize(_finalize(where + key) + chunk).sum(dtype=np.uint64)) for key in _keys(name)]
        total = total.plus(Sums(*sums))
    return total


def state_sums(state: State, schema: Schema) -> Sums:
    """The full digest of a state as sums: every element and one term per tensor."""
    total = ZERO
    for name, spec in schema.items():
        total = total.plus(tensor_term(name, spec)).plus(element_sums(name, None, bits(state[name])))
    return total


def state_digest(state: State, schema: Schema | None = None) -> str:
    """The digest of a complete state, as text. See the module's docstring; raises what `schema_of` raises."""
    return state_sums(state, schema_of(state, schema)).text()
