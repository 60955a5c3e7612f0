"""The byte streams of the `fast` codec: gap bytes, ULP distances grouped by old exponent, zstd-1 on each.

Every function has an exact inverse; decoders bound their output before they allocate.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from ..errors import InvalidPatch
from ..tensors import EXPONENT_SHIFT, Bits, unsigned
from .patch import index_type

ESCAPE = 255
_LEVEL = 1


def compress(raw: bytes) -> bytes:
    """zstd-1, or `raw` itself where that is not smaller (the reader knows by the length)."""
    packed = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=False).compress(raw)
    return packed if len(packed) < len(raw) else raw


def decompress(packed: bytes, size: int) -> bytes:
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


def pack_gaps(index: NDArray[np.integer[Any]]) -> bytes:
    """Strictly increasing indices as gap bytes: gap = index - previous - 1; byte 255 adds 255 and goes on."""
    gaps = index.astype(np.int64)
    gaps[1:] -= gaps[:-1].copy() + 1
    ends = np.cumsum(gaps // ESCAPE + 1) - 1
    out = np.full(int(ends[-1]) + 1 if len(ends) else 0, ESCAPE, dtype=np.uint8)
    out[ends] = gaps % ESCAPE
    return out.tobytes()


def unpack_gaps(raw: bytes, count: int, size: int) -> NDArray[np.integer[Any]]:
    """Inverse of `pack_gaps`. Raises InvalidPatch unless it gives exactly `count` indices below `size`."""
    data = np.frombuffer(raw, dtype=np.uint8)
    ends = np.flatnonzero(data != ESCAPE)
    if len(ends) != count or (len(data) and data[-1] == ESCAPE):
        raise InvalidPatch(f"gap stream gives {len(ends)} indices, expected {count}")
    index = np.cumsum(data, dtype=np.int64)[ends] + np.arange(count, dtype=np.int64)
    if count and index[-1] >= size:
        raise InvalidPatch(f"index {index[-1]} is outside a tensor of {size} elements")
    return index.astype(index_type(size), copy=False)


def max_gap_bytes(count: int, size: int) -> int:
    """The most bytes a valid gap stream can have."""
    return count + size // ESCAPE


def distances(old: Bits, new: Bits, dtype: str) -> Bits:
    """Zig-zag distance from old to new on the line of ordered values, mod 2^width; a bijection for every bit pattern.

    For floats the order is that of their values, so one ULP is distance 1; for integers it is the bits themselves.
    """
    delta = _ordered(new, dtype) - _ordered(old, dtype)
    top = np.array(old.dtype.itemsize * 8 - 1, dtype=old.dtype)
    sign = delta >> top
    zigzag: Bits = (delta << 1) ^ (0 - sign).astype(old.dtype)
    return zigzag


def from_distances(old: Bits, zigzag: Bits, dtype: str) -> Bits:
    """Inverse of `distances` given the old bits."""
    delta = (zigzag >> 1) ^ (0 - (zigzag & 1)).astype(old.dtype)
    return _unordered((_ordered(old, dtype) + delta).astype(old.dtype), dtype)


def exponent_order(old: Bits, dtype: str) -> NDArray[np.intp] | None:
    """The stable order of elements by old exponent, which both ends know; None for dtypes without exponent."""
    shift = EXPONENT_SHIFT.get(dtype)
    if shift is None:
        return None
    one = np.array(1, dtype=old.dtype)
    exponent = (old << one) >> np.array(shift + 1, dtype=old.dtype)
    return np.argsort(exponent, kind="stable")


def planes(values: Bits) -> list[bytes]:
    """Split values into byte planes, low byte first."""
    raw = values.astype(values.dtype.newbyteorder("<"), copy=False).view(np.uint8).reshape(len(values), -1)
    return [raw[:, k].tobytes() for k in range(values.dtype.itemsize)]


def join_planes(parts: list[bytes], count: int) -> Bits:
    """Inverse of `planes`."""
    raw = np.empty((count, len(parts)), dtype=np.uint8)
    for k, part in enumerate(parts):
        raw[:, k] = np.frombuffer(part, dtype=np.uint8)
    return raw.reshape(-1).view(np.dtype(unsigned(len(parts))).newbyteorder("<")).astype(unsigned(len(parts)))


def _ordered(value: Bits, dtype: str) -> Bits:
    if dtype not in EXPONENT_SHIFT:
        return value
    top = np.array(1 << (value.dtype.itemsize * 8 - 1), dtype=value.dtype)
    return np.where(value & top, ~value, value | top)


def _unordered(value: Bits, dtype: str) -> Bits:
    if dtype not in EXPONENT_SHIFT:
        return value
    top = np.array(1 << (value.dtype.itemsize * 8 - 1), dtype=value.dtype)
    return np.where(value & top, value ^ top, ~value)
