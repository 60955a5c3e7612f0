"""Samples to mutate: states of all dtypes and divisions, and payloads of all codecs between them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from math import prod
from random import Random

import numpy as np
from support.states import State, divided, edited, placed, random_state

from sync.codec import CODECS, diff, encode
from sync.pieces import Layout, layout_of
from sync.tensors import EXPONENT_SHIFT, WIDTH, Bits, TensorSpec, bits, unsigned

from . import oracle

SHAPES = ((), (0,), (1,), (2,), (9,), (5, 8), (7, 3, 2), (130,), (31, 9), (600,), (40, 40))
DIVISIONS = ((16, 4), (64, 32), (512, 128), (1 << 22, 1 << 12))
MOST_PIECES = 5
"""Of one tensor."""


@dataclass
class Sample:
    """A base in one buffer, payloads against it (`payload` is the one to mutate, `others` are for splices), and what
    the buffer holds after `payload`."""

    schema: dict[str, TensorSpec]
    layout: Layout
    state: State
    buffer: bytearray
    before: bytes
    payload: bytes
    others: list[bytes]
    after: bytes

    @cached_property
    def flat(self) -> dict[str, list[int]]:
        """The base as plain numbers."""
        return {name: bits(array).tolist() for name, array in self.state.items()}

    def said(self, payload: bytes) -> bytes:
        """The buffer after `payload`, by the oracle. Raises oracle.Refused. The buffer is left as it was."""
        changes = list(oracle.read(payload, self.schema, self.layout, self.flat))
        for change in changes:
            flat = self.state[change.name].reshape(-1)
            for index, (_, new) in change.bits.items():
                flat[index] = new
        found = bytes(self.buffer)
        self.buffer[:] = self.before
        return found


def _trained(rng: np.random.Generator, spec: TensorSpec) -> Bits:
    """Floats as training leaves them: few exponents, each further down rarer by half."""
    kind, shift, width = unsigned(spec.width), EXPONENT_SHIFT[spec.dtype], 8 * spec.width
    middle = (1 << (width - shift - 2)) - 1
    exponent = np.maximum(middle + 1 - rng.geometric(0.5, spec.size), 0).astype(np.uint64)
    mantissa = rng.integers(0, 1 << shift, spec.size, np.uint64)
    sign = rng.integers(0, 2, spec.size, np.uint64) << np.uint64(width - 1)
    found: Bits = (sign | exponent << np.uint64(shift) | mantissa).astype(kind)
    return found


def _base(rng: np.random.Generator, schema: dict[str, TensorSpec]) -> State:
    state = random_state(rng, schema, native=False)
    for name, spec in schema.items():
        if spec.dtype in EXPONENT_SHIFT and rng.random() < 0.6:
            state[name] = _trained(rng, spec).reshape(spec.shape)
    return state


def _next(rng: np.random.Generator, state: State, schema: dict[str, TensorSpec]) -> State:
    """Another state: single steps mostly, or anything."""
    density = float(rng.choice([0.003, 0.01, 0.05, 0.3, 0.7, 1.0]))
    new = edited(rng, state, schema, density if rng.random() < 0.5 else 0.003)
    for array in new.values():
        flat = bits(array)
        flat[rng.random(flat.size) < density] += np.array(rng.choice([1, 2, 255]), flat.dtype)
    bits(new["norm"])[rng.integers(new["norm"].size)] += np.array(1, new["norm"].dtype)
    return new


@contextmanager
def sample(seed: int) -> Iterator[Sample]:
    """A sample drawn by `seed`; the division of its states holds inside."""
    rng, choose = np.random.default_rng(seed), Random(seed)
    most, step = choose.choice(DIVISIONS)
    shapes = [shape for shape in SHAPES if prod(shape) <= MOST_PIECES * most]
    specs = [TensorSpec(choose.choice(sorted(WIDTH)), choose.choice(shapes)) for _ in range(choose.randint(0, 3))]
    schema = {f"layers.{i}.w": spec for i, spec in enumerate(specs)}
    last = [shape for shape in shapes if prod(shape) > most // 2] or [(1600,)]
    schema["norm"] = TensorSpec(choose.choice(("BF16", "BF16", "F32", "F16", "F8_E4M3")), choose.choice(last))
    with divided(most, step):
        state, buffer = placed(_base(rng, schema), odd=choose.random() < 0.2)
        payloads: list[bytes] = []
        for codec in (choose.choice(CODECS), choose.choice(CODECS), choose.choice(("fast", "tight"))):
            patch = diff(state, _next(rng, state, schema), schema, threads=1)
            limit = choose.choice((200, 2000, 1 << 62, 1 << 62))
            sparse = choose.random() < 0.6
            payloads += encode(patch, schema, codec, state, limit=limit, sparse=sparse, threads=1).objects[:2]
        choose.shuffle(payloads)
        found = Sample(schema, layout_of(schema), state, buffer, bytes(buffer), payloads[0], payloads[1:], b"")
        found.after = found.said(found.payload)
        yield found
