"""How few bits a change can cost: empirical entropies of what changed, given the old weights that a receiver holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sync.codec import TensorPatch
from sync.tensors import EXPONENT_SHIFT, Bits, Schema, State, bits

_CLASSES = 2048  # exponents of the widest float


class Bounds(NamedTuple):
    """Bits per changed element.

    place: where the changes are, nothing known. place_exponent: where, given the exponent of every old value.
    direction: up or down. steps_exponent: how many ULP, given the exponent. stateless: place_exponent + steps_exponent
    + one bit of direction, what a codec can reach that knows the old exponents and no earlier delta. One that also
    tells tensors apart, as any that codes them one by one, can go below.
    """

    place: float
    place_exponent: float
    direction: float
    steps_exponent: float
    stateless: float


class Facts(NamedTuple):
    """Elements, changed elements, and of these the shares that moved by exactly one ULP, and that changed sign."""

    elements: int
    changed: int
    one_ulp: float
    crossing: float


def measure(base: State, patch: Mapping[str, TensorPatch], schema: Schema) -> tuple[Bounds, Facts]:
    """The bounds and facts of one delta: `patch` leads away from `base`. All are 0 for an empty patch.

    Entropies (Shannon 1948) are of the frequencies in this delta: c changes among the n elements of a class cost
    n·H(c/n) bits to place, their ULP counts the empirical entropy of the class. A class is an exponent of a dtype;
    integers are one.
    """
    totals: dict[str, NDArray[np.int64]] = {}
    changed: dict[str, NDArray[np.int64]] = {}
    steps: dict[tuple[str, int], list[NDArray[np.int64]]] = {}
    up = one = crossing = 0
    for name, spec in schema.items():
        total = totals.setdefault(spec.dtype, np.zeros(_CLASSES, np.int64))
        total += np.bincount(_classes(bits(base[name]), spec.dtype), minlength=_CLASSES)
        if name not in patch:
            continue
        found = patch[name]
        classes = _classes(found.old, spec.dtype)
        count = changed.setdefault(spec.dtype, np.zeros(_CLASSES, np.int64))
        count += np.bincount(classes, minlength=_CLASSES)
        distance = _line(found.new, spec.dtype) - _line(found.old, spec.dtype)
        up += int((distance > 0).sum())
        one += int((abs(distance) == 1).sum())
        crossing += int(((found.old ^ found.new) >> (8 * spec.width - 1)).sum())
        for number in np.unique(classes):
            steps.setdefault((spec.dtype, int(number)), []).append(abs(distance[classes == number]))
    elements, moved = (sum(int(c.sum()) for c in part.values()) for part in (totals, changed))
    if not moved:
        return Bounds(0.0, 0.0, 0.0, 0.0, 0.0), Facts(elements, 0, 0.0, 0.0)
    given = sum(_places(totals[dtype], counts) for dtype, counts in changed.items()) / moved
    more = sum(_symbols(np.concatenate(found)) for found in steps.values()) / moved
    place, direction = (_places(np.array([n]), np.array([c])) / moved for n, c in ((elements, moved), (moved, up)))
    facts = Facts(elements, moved, one / moved, crossing / moved)
    return Bounds(place, given, direction, more, given + more + 1.0), facts


def _classes(values: Bits, dtype: str) -> NDArray[np.int64]:
    shift = EXPONENT_SHIFT.get(dtype)
    if shift is None:
        return np.zeros(len(values), np.int64)
    found: NDArray[np.int64] = (_magnitude(values) >> shift).astype(np.int64)
    return found


def _line(values: Bits, dtype: str) -> NDArray[np.int64]:
    """Values as integers in their order: one ULP is one step, and so is -0 to +0."""
    if dtype not in EXPONENT_SHIFT:
        whole: NDArray[np.int64] = values.view(f"i{values.itemsize}").astype(np.int64)
        return whole
    size: NDArray[np.int64] = _magnitude(values).astype(np.int64)
    return np.where(values >> (8 * values.itemsize - 1), -1 - size, size)


def _magnitude(values: Bits) -> Bits:
    """Floats without their sign bit."""
    found: Bits = values & values.dtype.type((1 << (8 * values.itemsize - 1)) - 1)
    return found


def _places(totals: NDArray[np.int64], chosen: NDArray[np.int64]) -> float:
    """Σ n·H(c/n), bits."""
    n, c = totals.astype(float), chosen.astype(float)
    inside = (c > 0) & (c < n)
    n, c = n[inside], c[inside]
    return float((c * np.log2(n / c) + (n - c) * np.log2(n / (n - c))).sum())


def _symbols(values: NDArray[np.int64]) -> float:
    """Length · empirical entropy, bits."""
    counts = np.unique(values, return_counts=True)[1].astype(float)
    return float((counts * np.log2(counts.sum() / counts)).sum())
