"""CRC-64/NVME, the checksum that an upload grant names, with numpy: a few hundred MB/s.

A CRC is linear over XOR. A block is cut into lanes of equal length whose checksums are taken side by side, eight bytes
per step through eight tables, and joined pairwise: the left one is moved past the bytes of the right one, then XORed.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

U64Array = NDArray[np.uint64]

_POLYNOMIAL = 0x9A6C9329AC4BC9B5  # 0xAD93D23594C93659 with its bits reversed
_ONES = np.uint64(0xFFFFFFFFFFFFFFFF)
_LANE = 1024
_BLOCK = 4 << 20


def crc64nvme(data: bytes) -> int:
    """The checksum of `data`."""
    return int(_join(_ONES, data) ^ _ONES)


def file_crc64nvme(path: Path) -> int:
    """The checksum of a file, read in blocks of 4 MiB."""
    state = _ONES
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            state = _join(state, block)
    return int(state ^ _ONES)


def _join(state: np.uint64, block: bytes) -> np.uint64:
    """The state after `block`, where `state` is the one before it."""
    moved = np.array([state], dtype=np.uint64)
    for bit in range(len(block).bit_length()):
        if len(block) >> bit & 1:
            moved = _apply(_shift(bit), moved)
    return np.uint64(moved[0] ^ _from_zero(block))


def _from_zero(block: bytes) -> np.uint64:
    """The state after `block` when it was 0 before; zeros in front of the block do not change it."""
    lanes = 1 << max(0, (len(block) - 1) // _LANE).bit_length()
    padded = bytes(lanes * _LANE - len(block)) + block
    words = np.ascontiguousarray(np.frombuffer(padded, dtype="<u8").reshape(lanes, _LANE // 8).T)
    states = np.zeros(lanes, dtype=np.uint64)
    tables = _tables()
    for word in words:
        octets = (states ^ word).view(np.uint8).reshape(lanes, 8)
        states = tables[7][octets[:, 0]]
        for n in range(1, 8):
            states ^= tables[7 - n][octets[:, n]]
    bit = _LANE.bit_length() - 1
    while len(states) > 1:
        states = _apply(_shift(bit), states[0::2]) ^ states[1::2]
        bit += 1
    return np.uint64(states[0])


@cache
def _tables() -> U64Array:
    """`[n][octet]`: the state that `octet`, followed by n zero bytes, leaves."""
    first = []
    for octet in range(256):
        state = octet
        for _ in range(8):
            state = state >> 1 ^ (_POLYNOMIAL if state & 1 else 0)
        first.append(state)
    tables = [np.array(first, dtype=np.uint64)]
    for _ in range(7):
        before = tables[-1]
        tables.append(before >> np.uint64(8) ^ tables[0][(before & np.uint64(255)).astype(np.intp)])
    return np.stack(tables)


@cache
def _shift(bit: int) -> U64Array:
    """The linear map that moves a state past 2**bit zero bytes, as the image of each of its 64 bits."""
    if bit:
        return _apply(_shift(bit - 1), _shift(bit - 1))
    unit = np.uint64(1) << np.arange(64, dtype=np.uint64)
    image: U64Array = unit >> np.uint64(8) ^ _tables()[0][(unit & np.uint64(255)).astype(np.intp)]
    return image


def _apply(matrix: U64Array, states: U64Array) -> U64Array:
    out = np.zeros_like(states)
    for n in range(64):
        out ^= matrix[n] * (states >> np.uint64(n) & np.uint64(1))
    return out
