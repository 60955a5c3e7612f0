"""Random states of every dtype, edits of them, hypothesis strategies for both, and an engine made of numpy arrays."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from sync import pieces, state_digest
from sync.codec import payload, reading
from sync.engine import TensorPatch
from sync.errors import InvalidPatch
from sync.safetensors_io import MappedCheckpoint
from sync.schema.base import Identity
from sync.tensors import EXPONENT_SHIFT, WIDTH, Bits, Schema, TensorSpec, bits, unsigned

State = dict[str, NDArray[Any]]

NATIVE = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "BF16": "uint16", "I16": "int16", "F16": "float16", "U32": "uint32",
    "I32": "int32", "F32": "float32", "U64": "uint64", "I64": "int64", "F64": "float64", "C64": "complex64",
}  # fmt: skip
"""The numpy dtype that means each safetensors dtype without a schema."""


def _specials(dtype: str) -> Bits:
    """Zero, all ones, and for floats: both zeros, infinities, NaN payloads, subnormals, the largest finite numbers."""
    width = WIDTH[dtype]
    kind, sign = unsigned(width), 1 << (8 * width - 1)
    if dtype == "BOOL":
        return np.array([0, 1], dtype=kind)
    found = {0, 1, sign, sign - 1, 2 * sign - 1}
    if dtype in EXPONENT_SHIFT:
        shift = EXPONENT_SHIFT[dtype]
        infinity = (sign - 1) >> shift << shift
        found |= {infinity, infinity | 1, infinity | (1 << shift - 1) | 1, infinity - 1, (1 << shift) - 1, 1 << shift}
        found |= {v | sign for v in found}
    return np.array(sorted(found), dtype=kind)


def random_bits(rng: np.random.Generator, spec: TensorSpec, count: int) -> Bits:
    """`count` bit patterns of a dtype, a third of them special."""
    special = _specials(spec.dtype)
    top = 2 if spec.dtype == "BOOL" else 2 ** (8 * spec.width)
    plain: Bits = rng.integers(0, top, size=count, dtype=np.uint64, endpoint=False).astype(unsigned(spec.width))
    picked = special[rng.integers(0, len(special), size=count)]
    return np.where(rng.random(count) < 0.33, picked, plain)


def random_state(rng: np.random.Generator, schema: Schema, *, native: bool = True) -> State:
    """A state of a schema, in the numpy dtypes that mean themselves, or with `native=False` as unsigned bits."""
    state: State = {}
    for name, spec in schema.items():
        raw = random_bits(rng, spec, spec.size)
        state[name] = (raw.view(NATIVE[spec.dtype]) if native and spec.dtype in NATIVE else raw).reshape(spec.shape)
    return state


def edited(rng: np.random.Generator, state: State, schema: Schema, density: float) -> State:
    """A copy in which about `density` of the elements differ: half by one bit pattern, half anyhow."""
    new = {name: array.copy() for name, array in state.items()}
    for name, spec in schema.items():
        flat = new[name].reshape(-1).view(unsigned(spec.width))
        at = np.flatnonzero(rng.random(spec.size) < density)
        anyhow = random_bits(rng, spec, len(at))
        near = flat[at] ^ np.array(1, flat.dtype)
        flat[at] = np.where(rng.random(len(at)) < 0.5, near, anyhow)
    return new


def same_bits(a: Mapping[str, NDArray[Any]], b: Mapping[str, NDArray[Any]]) -> bool:
    """True when two states agree in names, shapes and every bit."""
    return a.keys() == b.keys() and all(a[n].shape == b[n].shape and np.array_equal(bits(a[n]), bits(b[n])) for n in a)


def placed(state: Mapping[str, NDArray[Any]], *, odd: bool) -> tuple[State, bytearray]:
    """A copy of a state in one buffer, as bits, each tensor at a multiple of 8 bytes or (`odd`) one byte behind one."""
    at, where = 0, {}
    for name, array in state.items():
        at += -at % 8 + odd
        where[name] = at
        at += array.nbytes
    buffer = bytearray(at + 8)
    raw = np.frombuffer(buffer, np.uint8)
    copy: State = {}
    for name, array in state.items():
        here = raw[where[name] : where[name] + array.nbytes].view(unsigned(array.dtype.itemsize))
        here[:] = bits(array)
        copy[name] = here.reshape(array.shape)
    return copy, buffer


@contextmanager
def divided(most: int, step: int, *, batch: int | None = None) -> Iterator[None]:
    """Pieces and segments of at most `most` elements, cut at multiples of `step` (which divides it), and threads that
    take `batch` elements together; so that a small state has what a large one has."""
    assert most % step == 0
    batch = payload.BATCH if batch is None else batch
    pieces._layout.cache_clear()
    try:
        with (
            patch.object(pieces, "MOST", most),
            patch.object(pieces, "_STEP", step),
            patch.object(payload, "BATCH", batch),
            patch.object(reading, "BATCH", batch),
        ):
            yield
    finally:
        pieces._layout.cache_clear()


SHAPES = st.one_of(
    st.sampled_from([(), (0,), (1,), (3, 0, 2), (7,), (300,), (17, 31), (2, 3, 5), (1100,), (64, 40)]),
    st.lists(st.integers(0, 9), min_size=1, max_size=4).map(tuple),
)


@st.composite
def schemas(draw: st.DrawFn, *, native: bool | None = None) -> dict[str, TensorSpec]:
    """One to six tensors of any dtype and shape (`native`: of those that numpy dtypes mean)."""
    dtypes = st.sampled_from(sorted(NATIVE if native else WIDTH))
    specs = draw(st.lists(st.builds(TensorSpec, dtypes, SHAPES), min_size=1, max_size=6))
    return {f"layers.{i}.w": spec for i, spec in enumerate(specs)}


@st.composite
def pairs(draw: st.DrawFn) -> tuple[dict[str, TensorSpec], State, State]:
    """A schema, a state, and an edit of it with any density from nothing to everything."""
    schema = draw(schemas())
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    old = random_state(rng, schema, native=draw(st.booleans()))
    return schema, old, edited(rng, old, schema, draw(st.sampled_from([0.0, 0.003, 0.02, 0.2, 0.6, 1.0])))


def small_state(seed: int = 0, *, rows: int = 24) -> State:
    """A quick checkpoint: bf16 matrices, an fp32 vector, a counter, an empty and a 0-d tensor."""
    rng = np.random.default_rng(seed)
    return {
        "embed": rng.integers(0, 2**16, (rows, 16), dtype=np.uint16),
        "norm": rng.standard_normal(16).astype(np.float32),
        "step": np.array(seed, dtype=np.int64),
        "none": np.empty((0, 4), dtype=np.uint16),
        "head": rng.integers(0, 2**16, (rows, 16), dtype=np.uint16),
    }


def nudged(state: State, seed: int, *, share: float = 0.05) -> State:
    """A copy with about `share` of the bf16 elements moved by one, and always at least one."""
    rng = np.random.default_rng(seed)
    new = {name: array.copy() for name, array in state.items()}
    for name in ("embed", "head"):
        flat = new[name].reshape(-1)
        flat[rng.random(flat.size) < share] += 1
    new["embed"].reshape(-1)[seed % new["embed"].size] += 3
    return new


class NumpyEngine:
    """An engine of numpy arrays. `fail` maps a method's name to the error that its next call raises, after it wrote;
    `whole` names the tensors that the last apply got as a whole."""

    def __init__(self) -> None:
        self.state: State = {}
        self.identity: Identity | None = None
        self.paused = True
        self.loads = 0
        self.applies = 0
        self.whole: set[str] = set()
        self.served: list[Identity] = []
        self.fail: dict[str, BaseException] = {}
        self.lose_a_write = False

    def load(self, folder: Path, identity: Identity) -> None:
        """Copy a checkpoint folder and stay paused."""
        self.paused, self.loads = True, self.loads + 1
        self._maybe_fail("load")
        self.state = {name: array.copy() for name, array in MappedCheckpoint(folder).state.items()}
        self.identity = identity

    def pause(self) -> None:
        """Stop serving."""
        self._maybe_fail("pause")
        self.paused = True

    def apply(self, patches: Mapping[str, TensorPatch], identity: Identity) -> None:
        """Scatter while paused."""
        assert self.paused
        if unknown := patches.keys() - self.state.keys():
            raise InvalidPatch(f"unknown tensors {unknown}")
        self.applies += 1
        self.whole = {name for name, (index, _) in patches.items() if index is None}
        for name, (index, values) in patches.items():
            flat = self.state[name].reshape(-1)
            flat[slice(None) if index is None else index] = values
            if self.lose_a_write and len(values):
                self.lose_a_write = False
                flat[0 if index is None else index[0]] ^= 1
        self._maybe_fail("apply")
        self.identity = identity

    def read(self, name: str, index: NDArray[np.integer[Any]] | None) -> Bits:
        """The bits held."""
        self._maybe_fail("read")
        flat = self.state[name].reshape(-1)
        return flat.copy() if index is None else flat[index]

    def resume(self) -> None:
        """Serve on."""
        self._maybe_fail("resume")
        self.paused = False
        assert self.identity is not None
        self.served.append(self.identity)

    def digest(self, schema: Schema) -> str:
        """The state digest of what is held."""
        return state_digest(self.state, schema)

    def _maybe_fail(self, method: str) -> None:
        if method in self.fail:
            raise self.fail.pop(method)
