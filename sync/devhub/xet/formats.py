"""Hashes as xet prints them, and xorbs: chunks one after the other, each with a header of eight bytes.

    xorb  = chunk* [footer]       footer: starts with XETBLOB and ends with its own length (less these 4 bytes) as u32
    chunk = version u8 = 0, packed length u24, scheme u8, length u24, packed bytes           (little-endian)
    scheme 0 as it is, 1 LZ4 frame, 2 bytes at positions 0, 4, 8 … first, then 1, 5, 9 …, and so on; then LZ4 frame

Everything here comes from outside: sizes are bounded before anything is allocated.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass

import lz4.frame
import numpy as np
from numpy.typing import NDArray

from ...errors import CorruptObject, InvalidRequest

EMPTY_FILE = "0" * 64
MAX_BODY = 72 << 20
"""Bytes of a xorb as sent: 64 MiB of chunks, their headers, and a footer."""
MAX_CONTENT = 65 << 20
"""Bytes of a xorb's chunks unpacked. Clients stay below 64 MiB."""
MAX_CHUNK = 1 << 20
"""Bytes of one chunk unpacked. Clients cut at 128 KiB."""
MAX_CHUNKS = 1 << 14
"""Chunks of one xorb. Clients stop at 8,192."""
HEADER = 8
_SCHEMES = (0, 1, 2)
_FOOTER = b"XETBLOB"
_HEX = re.compile(r"[0-9a-f]{64}")


def hash_bytes(text: str) -> bytes:
    """The 32 bytes of a hash in xet's hexadecimal: four little-endian u64, each printed as a number.

    Raises InvalidRequest when it is not 64 hexadecimal digits.
    """
    if not _HEX.fullmatch(text.lower()):
        raise InvalidRequest(f"the hash {text[:80]!r} is not 64 hexadecimal digits; send the hash that hf_xet gives")
    return struct.pack("<4Q", *(int(text[n : n + 16], 16) for n in range(0, 64, 16)))


def hash_hex(raw: bytes) -> str:
    """The inverse of `hash_bytes`. A sha256 inside a shard comes out as everybody prints it."""
    return "".join(f"{word:016x}" for word in struct.unpack("<4Q", raw))


@dataclass(frozen=True)
class Layout:
    """Where the chunks of a xorb lie. Both arrays are u32 with one entry more than there are chunks.

    Chunk n has its header at `packed[n]` of the file, ends before `packed[n + 1]`, and holds the bytes `content[n]` to
    `content[n + 1]` of the unpacked xorb.
    """

    packed: NDArray[np.uint32]
    content: NDArray[np.uint32]

    @property
    def chunks(self) -> int:
        """How many chunks there are."""
        return len(self.packed) - 1

    def length(self, start: int, end: int) -> int:
        """Unpacked bytes of the chunks from `start` to `end`, end exclusive."""
        return int(self.content[end]) - int(self.content[start])

    def to_bytes(self) -> bytes:
        """For `from_bytes`."""
        return self.packed.astype("<u4").tobytes() + self.content.astype("<u4").tobytes()

    @classmethod
    def from_bytes(cls, data: bytes) -> Layout:
        """What `to_bytes` gave."""
        both = np.frombuffer(data, dtype="<u4")
        return cls(both[: len(both) // 2], both[len(both) // 2 :])


def walk(file: int, size: int) -> Layout:
    """Read the chunk headers of a xorb of `size` bytes from an open descriptor; the packed bytes stay unread.

    Raises InvalidRequest that names the chunk and what is wrong with it.
    """
    packed, content = [0], [0]
    while (at := packed[-1]) < size:
        header = os.pread(file, HEADER, at)
        if header.startswith(_FOOTER):
            _check_footer(file, at, size)
            break
        n = len(packed) - 1
        if n == MAX_CHUNKS:
            raise InvalidRequest(f"the xorb has more than {MAX_CHUNKS} chunks; split it")
        if len(header) < HEADER:
            raise InvalidRequest(f"chunk {n}: {len(header)} bytes left, expected a header of {HEADER}")
        packed_length, length = _check_header(n, header)
        if at + HEADER + packed_length > size:
            raise InvalidRequest(f"chunk {n}: {packed_length} bytes announced, {size - at - HEADER} are left")
        packed.append(at + HEADER + packed_length)
        content.append(content[-1] + length)
        if content[-1] > MAX_CONTENT:
            raise InvalidRequest(f"the xorb unpacks to more than {MAX_CONTENT} bytes; split it")
    if len(packed) == 1:
        raise InvalidRequest("the xorb has no chunk; expected at least one")
    return Layout(np.array(packed, dtype=np.uint32), np.array(content, dtype=np.uint32))


def _check_header(n: int, header: bytes) -> tuple[int, int]:
    """(packed length, length) of chunk `n`."""
    version, scheme = header[0], header[4]
    packed, length = int.from_bytes(header[1:4], "little"), int.from_bytes(header[5:8], "little")
    if version != 0:
        raise InvalidRequest(f"chunk {n}: version {version}, expected 0")
    if scheme not in _SCHEMES:
        raise InvalidRequest(f"chunk {n}: compression scheme {scheme}, expected one of {_SCHEMES}")
    if not 1 <= length <= MAX_CHUNK:
        raise InvalidRequest(f"chunk {n}: {length} bytes unpacked, expected 1 to {MAX_CHUNK}")
    if scheme == 0 and packed != length:
        raise InvalidRequest(f"chunk {n}: {packed} bytes stored as they are, expected {length}")
    if packed > length + length // 128 + 64:
        raise InvalidRequest(f"chunk {n}: {packed} bytes packed are too many for {length} unpacked")
    return packed, length


def _check_footer(file: int, at: int, size: int) -> None:
    said = int.from_bytes(os.pread(file, 4, size - 4), "little")
    if size - at < 12 or said != size - at - 4:
        raise InvalidRequest(f"the xorb's footer says {said} bytes, found {size - at - 4}")


def unpack(packed: memoryview, layout: Layout, start: int, end: int) -> Iterator[bytes]:
    """The chunks from `start` to `end` (exclusive), each unpacked; `packed` begins at the header of chunk `start`.

    Raises CorruptObject when a chunk does not unpack to the length that the layout has for it.
    """
    origin = int(layout.packed[start])
    for n in range(start, end):
        begin, stop = int(layout.packed[n]) - origin, int(layout.packed[n + 1]) - origin
        length = layout.length(n, n + 1)
        try:
            data = decode(packed[begin + 4], packed[begin + HEADER : stop], length)
        except (RuntimeError, IndexError) as error:
            raise CorruptObject(f"chunk {n} of a xorb cannot be unpacked ({error}); upload the file again") from None
        if len(data) != length:
            raise CorruptObject(f"chunk {n} of a xorb has {len(data)} bytes, expected {length}; upload the file again")
        yield data


def decode(scheme: int, packed: memoryview, length: int) -> bytes:
    """Unpack one chunk, at most `length` + 1 bytes of it. Raises RuntimeError (from lz4) for a broken frame."""
    if scheme == 0:
        return bytes(packed[: length + 1])
    frame = lz4.frame.LZ4FrameDecompressor()
    data = bytes(frame.decompress(packed, max_length=length + 1))
    if not frame.eof and len(data) <= length:
        raise RuntimeError("the LZ4 frame is cut off")
    return _ungroup(data) if scheme == 2 else data


def _ungroup(data: bytes) -> bytes:
    """Undo the grouping by position modulo 4."""
    source, out = np.frombuffer(data, dtype=np.uint8), np.empty(len(data), dtype=np.uint8)
    at = 0
    for n in range(4):
        part = out[n::4]
        part[:] = source[at : at + len(part)]
        at += len(part)
    return out.tobytes()
