"""What a changed element became, told by its old bits: a direction, and a distance that is nearly always one step.

Bits are taken as points on a line: floats in the order of their values, so that one ULP is one step; integers as they
are. The distance is mod 2^width, so every bit pattern, NaN included, is a point and can be reached. One bit per change
says the direction. Every class of the old bits (the exponent: small values move many ULPs, large ones one) has a usual
number of steps. Any other is an *exception*, listed per class: run lengths of usual changes, and how far from the usual
it is, folded to the small numbers (+1, -1, +2, …; one-sided where no steps are left below), both in Rice codes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import InvalidPatch
from ..kernels import compiled
from ..tensors import EXPONENT_SHIFT, WIDTH, Bits, unsigned
from . import rice, varint

_NEVER = np.int64(1 << 62)
_MOST_USUAL = 64


class Line(NamedTuple):
    """How the bits of a dtype are read: class = (bits & mask) >> shift below `classes`; top is the sign bit of floats
    and 0 for integers, which are one class; width in bytes."""

    mask: np.uint64
    shift: np.uint64
    top: np.uint64
    full: np.uint64
    classes: int
    width: int


def line_of(dtype: str) -> Line:
    """The line of a safetensors dtype."""
    width = WIDTH[dtype]
    full = (1 << (8 * width)) - 1
    shift = EXPONENT_SHIFT.get(dtype)
    if shift is None:
        return Line(np.uint64(0), np.uint64(0), np.uint64(0), np.uint64(full), 1, width)
    top = 1 << (8 * width - 1)
    return Line(np.uint64(top - 1), np.uint64(shift), np.uint64(top), np.uint64(full), top >> shift, width)


@compiled
def _measure(
    old: NDArray[Any], new: NDArray[Any], mask: Any, shift: Any, top: Any, full: Any, signs: NDArray[Any],
    classes: NDArray[Any], steps: NDArray[Any], seen: NDArray[Any],
) -> None:  # fmt: skip
    """Fill `signs` (bits), the class of each change, how many steps it went, and how often a class went how many
    (`seen` [classes, steps]; more than it has room for are not counted)."""
    half = (full >> np.uint64(1)) + np.uint64(1)
    for j in range(len(old)):
        before, after = np.uint64(old[j]), np.uint64(new[j])
        c = (before & mask) >> shift
        before = (before ^ full if before & top else before | top) if top else before
        after = (after ^ full if after & top else after | top) if top else after
        step = (after - before) & full
        if step >= half:
            step = (np.uint64(0) - step) & full
            signs[j >> 3] |= np.uint8(1 << (j & 7))
        classes[j], steps[j] = c, step
        if step < np.uint64(seen.shape[1]):
            seen[c, step] += 1


@compiled
def _except(
    classes: NDArray[Any], steps: NDArray[Any], usual: NDArray[Any], since: NDArray[Any], runs: NDArray[Any]
) -> Any:
    """Move the exceptions to the front of `classes` and `steps`, which become their folded steps, and fill their
    `runs`; returns how many there are."""
    at = 0
    for j in range(len(classes)):
        c, step = classes[j], np.int64(steps[j])
        away = step - usual[c]
        if away == 0:
            since[c] += 1
            continue
        below = usual[c] - 1
        two_sided = 2 * away - 2 if away > 0 else -2 * away - 1
        classes[at], runs[at], steps[at] = c, since[c], below + away - 1 if away > below else two_sided
        since[c] = 0
        at += 1
    return at


@compiled
def _apply(
    old: NDArray[Any], mask: Any, shift: Any, top: Any, full: Any, signs: NDArray[Any], usual: NDArray[Any],
    at: NDArray[Any], ends: NDArray[Any], runs: NDArray[Any], folded: NDArray[Any], new: NDArray[Any],
) -> Any:  # fmt: skip
    """Fill `new`; returns False when an exception was announced and not reached, or is out of range. Without branches
    but for exceptions: directions and signs cannot be foretold."""
    for n in range(len(folded)):
        if runs[n] > np.uint64(len(old)) or folded[n] >= full >> np.uint64(1):
            return False
    until = np.empty(len(at), np.int64)
    for c in range(len(at)):
        until[c] = np.int64(runs[at[c]]) if at[c] < ends[c] else _NEVER
    zero, one = np.uint64(0), np.uint64(1)
    flip = full if top else zero
    high = np.uint64(8 * old.itemsize - 1)
    for j in range(len(old)):
        before = np.uint64(old[j])
        c = (before & mask) >> shift
        step = usual[c]
        left = until[c]
        if left == 0:
            k = at[c]
            fold, below = np.int64(folded[k]), step - 1
            if fold >= 2 * below:
                step += fold - below + 1
            else:
                step += fold // 2 + 1 if fold % 2 == 0 else -(fold // 2 + 1)
            at[c] = k + 1
            until[c] = np.int64(runs[k + 1]) if k + 1 < ends[c] else _NEVER
        else:
            until[c] = left - 1
        down = zero - np.uint64((signs[j >> 3] >> np.uint8(j & 7)) & np.uint8(1))
        before ^= top | ((zero - (before >> high)) & flip)
        after = (before + ((np.uint64(step) ^ down) - down)) & full
        new[j] = after ^ (top | ((zero - ((after >> high) ^ one)) & flip))
    return np.all(at == ends)


@compiled
def _classes(
    used: NDArray[Any], counts: NDArray[Any], told: NDArray[Any], most: int, usual: NDArray[Any], at: NDArray[Any],
    ends: NDArray[Any], groups: NDArray[Any],
) -> Any:  # fmt: skip
    """Fill the `usual` step of every class, where its exceptions are in the list (`at` to `ends`), and where the groups
    of runs and of folded steps begin and end; False when a usual step is not 1 to `most`. `counts` are of one more than
    there are exceptions."""
    usual[:] = 1
    at[:] = 0
    ends[:] = 0
    rows = len(used)
    for r in range(rows):
        c = used[r]
        if not 1 <= told[r] <= most:
            return False
        usual[c], at[c] = told[r], groups[r]
        ends[c] = groups[r + 1] = groups[r] + counts[r] - 1
    for r in range(rows):
        groups[rows + r + 1] = groups[rows] + groups[r + 1]
    return True


@compiled
def _table(
    found: NDArray[Any], classes: Any, most: Any, used: NDArray[Any], counts: NDArray[Any], columns: NDArray[Any]
) -> Any:  # fmt: skip
    """Fill the rest from the rows `found`; False when they say what is not possible."""
    last, left = np.int64(-1), np.int64(most)
    for r in range(len(found)):
        if found[r, 0] >= classes or found[r, 1] >= most:
            return False
        last += np.int64(found[r, 0]) + 1
        left -= np.int64(found[r, 1]) + 1
        if last >= np.int64(classes) or left < 0:
            return False
        used[r], counts[r] = last, np.int64(found[r, 1]) + 1
        for k in range(len(columns)):
            if found[r, 2 + k] > np.uint64(255):
                return False
            columns[k, r] = found[r, 2 + k]
    return True


@compiled
def group(classes: NDArray[Any], values: NDArray[Any], at: NDArray[Any], out: NDArray[Any]) -> None:
    """Stable counting sort: out[at[class]++] = value."""
    for j in range(len(classes)):
        c = classes[j]
        out[at[c]] = values[j]
        at[c] += 1


def pack(old: Bits, new: Bits, line: Line) -> bytes:
    """The streams of one segment's changes, given their old and new bits (which differ everywhere)."""
    count = len(old)
    signs = np.zeros(-(-count // 8), np.uint8)
    classes, runs, steps = np.empty(count, np.uint16), np.empty(count, np.uint32), np.empty(count, old.dtype)
    seen = np.zeros((line.classes, _MOST_USUAL + 1), np.int32)
    _measure(old, new, line.mask, line.shift, line.top, line.full, signs, classes, steps, seen)
    usual = np.maximum(seen.argmax(1), 1)
    found = int(_except(classes, steps, usual, np.zeros(line.classes, np.int64), runs))
    counts = np.bincount(classes[:found], minlength=line.classes)
    used = np.flatnonzero((counts > 0) | (usual > 1))
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    listed = np.empty(2 * found, np.uint64)
    group(classes[:found], runs[:found], offsets[:-1].copy(), listed[:found])
    group(classes[:found], steps[:found], offsets[:-1].copy(), listed[found:])
    ends = np.concatenate([[0], offsets[1:][used], found + offsets[1:][used]]).astype(np.int64)
    ks, bits = rice.write(listed, ends)
    table = pack_table(used, counts[used] + 1, usual[used], ks[: len(used)], ks[len(used) :])
    return b"".join((signs.tobytes(), table, varint.pack([len(bits)]), bits))


def unpack(cursor: varint.Cursor, old: Bits, line: Line) -> Bits:
    """Inverse of `pack`, given the old bits. Raises InvalidPatch."""
    count = len(old)
    signs = np.frombuffer(cursor.take(-(-count // 8)), np.uint8)
    if count % 8 and signs[-1] >> (count % 8):
        raise InvalidPatch("directions of changes that are not there")
    most = int(line.full) >> 1
    used, counts, columns = unpack_table(cursor, line.classes, 2 * count, columns=3)
    usual, at, ends = (np.empty(line.classes, np.int64) for _ in range(3))
    groups = np.zeros(2 * len(used) + 1, np.int64)
    if not _classes(used, counts, columns[0], min(_MOST_USUAL, most + 1), usual, at, ends, groups):
        raise InvalidPatch("a usual step is out of range")
    found = int(groups[len(used)])
    if found > count:
        raise InvalidPatch("more exceptions than changes")
    bits = cursor.take(cursor.number(cursor.left))
    listed = rice.read(bits, columns[1:].reshape(-1), groups, np.uint64, max(most, count))
    new = np.empty(count, unsigned(line.width))
    key = (line.mask, line.shift, line.top, line.full)
    if not _apply(old, *key, signs, usual, at, ends, listed[:found], listed[found:], new):
        raise InvalidPatch("more exceptions than changes, or one is out of range")
    return new


def pack_table(used: NDArray[Any], counts: NDArray[Any], *columns: NDArray[Any]) -> bytes:
    """A table of classes (rising, as differences), how many each has, and further columns of small numbers."""
    rows = np.stack([np.diff(used, prepend=-1) - 1, counts - 1, *columns], axis=1)
    return varint.pack([len(used)]) + varint.pack(rows.reshape(-1))


def unpack_table(
    cursor: varint.Cursor, classes: int, most: int, *, columns: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.uint8]]:
    """Inverse of `pack_table`: (classes, counts of at most `most` together, columns × rows)."""
    rows = cursor.number(min(classes, most))
    found = cursor.numbers(rows * (2 + columns)).reshape(rows, 2 + columns)
    used, counts = np.empty(rows, np.int64), np.empty(rows, np.int64)
    rest = np.empty((columns, rows), np.uint8)
    if not _table(found, np.uint64(classes), np.uint64(most), used, counts, rest):
        raise InvalidPatch(f"a table says what is not possible with {most} in {classes} classes")
    return used, counts, rest
