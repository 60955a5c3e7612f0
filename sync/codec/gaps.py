"""Where elements changed: gap bytes (`fast`), or gaps within each class of the old bits (`tight`).

fast: the s low bits of each gap to the previous change as they are, the rest as bytes (255 adds 255 and goes on) under
zstd-1. Needs no base. tight: the probability of a change doubles with every step down in the exponent of the old value,
so within one exponent gaps are geometric, which Rice codes meet almost exactly; both ends walk the old bits. In a class
where most elements changed, the runs of changes between unchanged ones are listed instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from ..errors import BaseMismatch, InvalidPatch
from ..kernels import compiled
from ..tensors import Bits
from . import rice, varint
from .values import Line, group, pack_table, unpack_table

ESCAPE = 255
MOST_SHIFT = 22
_LEVEL = 1
_NEVER = np.int32((1 << 31) - 1)


def compress(raw: bytes) -> bytes:
    """zstd-1, or `raw` itself where that is not smaller (the reader knows by the length)."""
    packed = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=False).compress(raw)
    return packed if len(packed) < len(raw) else raw


def decompress(packed: memoryview | bytes, size: int) -> bytes | memoryview:
    """Inverse of `compress` for a known raw size. Raises InvalidPatch when the frame gives anything else."""
    if len(packed) == size:
        return packed
    try:
        if len(packed) > size or zstandard.frame_content_size(packed) != size:
            raise InvalidPatch(f"a stream of {len(packed)} bytes does not announce the {size} bytes it must give")
        raw = zstandard.ZstdDecompressor(max_window_size=1 << 27).decompress(packed, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise InvalidPatch(f"a compressed stream is damaged ({error})") from None
    if len(raw) != size:
        raise InvalidPatch(f"a stream gave {len(raw)} bytes, expected {size}")
    return raw


@compiled
def _write_gaps(index: NDArray[Any], shift: Any, out: NDArray[Any], low: NDArray[Any]) -> Any:
    """Gap bytes to `out` (how many is returned) and low bits to `low`."""
    at = filled = word = 0
    acc = np.uint64(0)
    mask = (np.uint64(1) << np.uint64(shift)) - np.uint64(1)
    last = -1
    for j in range(len(index)):
        gap = index[j] - last - 1
        last = index[j]
        high = gap >> shift
        while high >= 255:
            out[at] = 255
            at += 1
            high -= 255
        out[at] = high
        at += 1
        if shift:
            acc |= (np.uint64(gap) & mask) << np.uint64(filled)
            filled += shift
            if filled >= 32:
                low[word] = acc & np.uint64(0xFFFFFFFF)
                word += 1
                acc >>= np.uint64(32)
                filled -= 32
    if filled:
        low[word] = acc & np.uint64(0xFFFFFFFF)
    return at


@compiled
def _read_gaps(raw: NDArray[Any], shift: Any, low: NDArray[Any], size: Any, index: NDArray[Any]) -> Any:
    """Inverse: fill `index`; returns False unless the bytes are exactly that many indices below `size`."""
    at = filled = word = 0
    acc = np.uint64(0)
    mask = (np.uint64(1) << np.uint64(shift)) - np.uint64(1)
    last = -1
    end = len(raw)
    for j in range(len(index)):
        high = 0
        while at < end and raw[at] == 255:
            high += 255
            at += 1
        if at >= end:
            return False
        gap = (high + raw[at]) << shift
        at += 1
        if shift:
            if filled < shift:
                acc |= np.uint64(low[word]) << np.uint64(filled)
                word += 1
                filled += 32
            gap |= np.int64(acc & mask)
            acc >>= np.uint64(shift)
            filled -= shift
        last += 1 + gap
        if last >= size:
            return False
        index[j] = last
    return at == end


def pack_fast(index: NDArray[np.int32], size: int) -> bytes:
    """Strictly increasing indices below `size` (at most 2^22)."""
    count = len(index)
    shift = max(0, (size // count).bit_length() - 6)
    gaps = np.empty(count + (size >> shift) // ESCAPE, np.uint8)
    low = np.zeros(count * shift // 32 + 1, "<u4")
    used = int(_write_gaps(index, shift, gaps, low))
    packed = compress(gaps[:used].tobytes())
    head = varint.pack([shift, used, len(packed)])
    return b"".join((head, packed, low.tobytes()[: -(-count * shift // 8)]))


def unpack_fast(cursor: varint.Cursor, count: int, size: int) -> NDArray[np.int32]:
    """Inverse of `pack_fast`. Raises InvalidPatch unless it gives exactly `count` indices below `size`."""
    shift = cursor.number(MOST_SHIFT)
    used = cursor.number(count + (size >> shift) // ESCAPE)
    if used < count:
        raise InvalidPatch(f"{used} gap bytes for {count} indices")
    raw = np.frombuffer(decompress(cursor.take(cursor.number(cursor.left)), used), np.uint8)
    bits = cursor.take(-(-count * shift // 8))
    if count * shift % 8 and bits[-1] >> (count * shift % 8):
        raise InvalidPatch("low bits of gaps that are not there")
    low = np.zeros(len(bits) // 4 + 2, "<u4")
    low.view(np.uint8)[: len(bits)] = np.frombuffer(bits, np.uint8)
    index = np.empty(count, np.int32)
    if not _read_gaps(raw, shift, low, size, index):
        raise InvalidPatch(f"gaps that do not give {count} indices below {size}")
    return index


@compiled
def _count(
    old: NDArray[Any], index: NDArray[Any], start: int, mask: Any, shift: Any, since: NDArray[Any],
    changed: NDArray[Any], unchanged: NDArray[Any], classes: NDArray[Any], gaps: NDArray[Any],
) -> None:  # fmt: skip
    """The class of each change and how many of its class lie between it and the one before; `since` [4, classes] goes
    on over pieces, and how many `changed` and, before a change, `unchanged` a class has. Four counters per class, so
    that neighbours of one class need not wait for each other."""
    one, two, three, four = since[0], since[1], since[2], since[3]
    i = 0
    for j in range(len(index) + 1):
        stop = index[j] - start if j < len(index) else len(old)
        while i + 4 <= stop:
            one[(np.uint64(old[i]) & mask) >> shift] += 1
            two[(np.uint64(old[i + 1]) & mask) >> shift] += 1
            three[(np.uint64(old[i + 2]) & mask) >> shift] += 1
            four[(np.uint64(old[i + 3]) & mask) >> shift] += 1
            i += 4
        while i < stop:
            one[(np.uint64(old[i]) & mask) >> shift] += 1
            i += 1
        if j < len(index):
            c = (np.uint64(old[i]) & mask) >> shift
            gap = one[c] + two[c] + three[c] + four[c]
            classes[j], gaps[j] = c, gap
            changed[c] += 1
            unchanged[c] += gap
            one[c] = two[c] = three[c] = four[c] = 0
            i += 1


@compiled
def _flip(gaps: NDArray[Any], tail: int, out: NDArray[Any]) -> None:
    """Runs of changes before each unchanged element, from the runs of unchanged ones before each change and after the
    last."""
    at = run = 0
    for j in range(len(gaps) + 1):
        here = np.int64(gaps[j]) if j < len(gaps) else tail
        for _ in range(here):
            out[at] = run
            at += 1
            run = 0
        run += 1


@compiled
def _walk(
    old: NDArray[Any], start: int, mask: Any, shift: Any, left: NDArray[Any], runs: NDArray[Any],
    flipped: NDArray[Any], at: NDArray[Any], ends: NDArray[Any], gaps: NDArray[Any], found: int, index: NDArray[Any],
    values: NDArray[Any],
) -> Any:  # fmt: skip
    """Fill `index` and the old `values` there from `found` on; returns how many are found then, one more than there is
    room for when there are too many. `left` stays 0 for flipped classes, whose `runs` are counted down instead."""
    for i in range(len(old)):
        c = (np.uint64(old[i]) & mask) >> shift
        if left[c] != 0:
            left[c] -= 1
            continue
        if flipped[c] and runs[c] != 0:
            runs[c] -= 1
        else:
            k = at[c] + 1
            at[c] = k
            following = gaps[k] if k < ends[c] else _NEVER
            if flipped[c]:
                runs[c] = following
                continue
            left[c] = following
        if found >= len(index):
            return found + 1
        index[found], values[found] = start + i, old[i]
        found += 1
    return found


def pack_tight(index: NDArray[np.int32], pieces: Sequence[Bits], line: Line) -> bytes:
    """Strictly increasing indices into the concatenated `pieces`, which are the old bits of one segment."""
    classes, gaps = np.empty(len(index), np.uint16), np.empty(len(index), np.uint32)
    since = np.zeros((4, line.classes), np.int32)
    counts, unchanged = np.zeros(line.classes, np.int64), np.zeros(line.classes, np.int64)
    start = first = 0
    for old in pieces:
        last = int(np.searchsorted(index, start + len(old)))
        part = slice(first, last)
        told = (classes[part], gaps[part])
        _count(old, index[part], start, line.mask, line.shift, since, counts, unchanged, *told)
        start, first = start + len(old), last
    used = np.flatnonzero(counts)
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    grouped = np.empty_like(gaps)
    group(classes, gaps, offsets[:-1].copy(), grouped)
    tails = since.sum(0)
    unchanged += tails
    flipped = unchanged < counts
    for c in np.flatnonzero(flipped):
        runs = np.empty(unchanged[c], np.uint32)
        _flip(grouped[offsets[c] : offsets[c + 1]], int(tails[c]), runs)
        grouped[offsets[c] : offsets[c] + unchanged[c]] = runs
    events = np.where(flipped, unchanged, counts)[used]
    listed = np.concatenate([grouped[offsets[c] : offsets[c] + n] for c, n in zip(used, events, strict=True)])
    ks, bits = rice.write(listed, np.concatenate([[0], np.cumsum(events)]).astype(np.int64))
    table = pack_table(used, events + flipped[used], 2 * ks.astype(np.int64) + flipped[used])
    return table + varint.pack([len(bits)]) + bits


def unpack_tight(
    cursor: varint.Cursor, count: int, pieces: Sequence[Bits], line: Line
) -> tuple[NDArray[np.int32], Bits]:
    """Inverse of `pack_tight`: (indices, the old bits there). Raises InvalidPatch, and BaseMismatch when `pieces` have
    not the changes that are told."""
    used, events, columns = unpack_table(cursor, line.classes, count, columns=1)
    inside = (columns[0] & 1).astype(np.bool_)
    events -= inside
    offsets = np.concatenate([[0], np.cumsum(events)]).astype(np.int64)
    size = sum(map(len, pieces))
    gaps = rice.read(cursor.take(cursor.number(cursor.left)), columns[0] >> 1, offsets, np.uint32, size).view(np.int32)
    left, at, ends = (np.zeros(line.classes, kind) for kind in (np.int32, np.int64, np.int64))
    flipped = np.zeros(line.classes, np.bool_)
    left[:] = _NEVER
    flipped[used], at[used], ends[used] = inside, offsets[:-1], offsets[1:]
    some = events > 0
    left[used[some]] = gaps[offsets[:-1][some]]
    runs = left.copy()
    left[flipped] = 0
    index, values = np.empty(count, np.int32), np.empty(count, pieces[0].dtype)
    start = found = 0
    for old in pieces:
        found = int(_walk(old, start, line.mask, line.shift, left, runs, flipped, at, ends, gaps, found, index, values))
        start += len(old)
        if found > count:
            break
    if found != count or not np.array_equal(at, ends):
        raise BaseMismatch(
            f"the base has {found} of {count} changes in their classes: it is another one, or the delta is damaged"
        )
    return index, values
