"""Shards: which chunks of which xorbs a file consists of, and which chunks a xorb holds. Records of 48 bytes.

    shard = header, file*, bookend, xorb*, bookend [, lookup tables, footer]                 (little-endian)
    file  = hash, flags u32, n u32, u64; n terms; with flag bit 31 n verification records; with bit 30 one sha256 record
    xorb  = hash, flags u32, n u32, unpacked bytes u32, packed bytes u32; n chunks

Clients send shards without lookup tables and footer, and expect both in an answer. Whatever follows the second bookend
of a received shard is ignored.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import InvalidRequest

RECORD = 48
MAX_BODY = 64 << 20
"""Bytes of a shard as sent; clients start another one before that."""
TERM = np.dtype([("xorb", "V32"), ("flags", "<u4"), ("length", "<u4"), ("start", "<u4"), ("end", "<u4")])
CHUNK = np.dtype([("hash", "V32"), ("offset", "<u4"), ("length", "<u4"), ("flags", "<u4"), ("unused", "<u4")])
Records = NDArray[Any]

_TAG = b"HFRepoMetaData\x00" + bytes([85, 105, 103, 69, 106, 123, 129, 87, 131, 165, 189, 217, 92, 205, 209, 74, 169])
_VERSION = 2
_FOOTER_VERSION = 1
_FOOTER_SIZE = 200
_BOOKEND = b"\xff" * 32
_VERIFIED = 1 << 31
_WITH_SHA256 = 1 << 30
_SHARED = 1 << 31


@dataclass(frozen=True)
class ShardFile:
    """A file: its terms in order (TERM), and its sha256 where the client told it. Hashes are raw bytes."""

    hash: bytes
    sha256: bytes | None
    terms: Records

    @property
    def size(self) -> int:
        """Bytes of the file, as its terms say."""
        return int(self.terms["length"].sum(dtype=np.int64))


@dataclass(frozen=True)
class ShardXorb:
    """A xorb: its chunks in order (CHUNK), bytes as stored. The hash is raw bytes."""

    hash: bytes
    packed_size: int
    chunks: Records


def parse_shard(data: bytes) -> tuple[list[ShardFile], list[ShardXorb]]:
    """Take a shard apart. Raises InvalidRequest naming what does not fit; what the records claim is not yet checked."""
    if data[:32] != _TAG:
        raise InvalidRequest("the body is not a shard: its first 32 bytes are not the tag of one")
    version = int.from_bytes(data[32:40], "little")
    if version != _VERSION:
        raise InvalidRequest(f"the shard has version {version}, expected {_VERSION}")
    reader = _Reader(data)
    files = []
    while (head := reader.head()) is not None:
        files.append(_file(reader, *head))
    xorbs = []
    while (head := reader.head()) is not None:
        name, _, count, _, packed_size = head
        xorbs.append(ShardXorb(name, packed_size, reader.take(count, CHUNK)))
    return files, xorbs


class _Reader:
    """Records from the front to the back; never beyond the end."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = RECORD

    def take(self, count: int, dtype: np.dtype[Any]) -> Records:
        if self._at + count * RECORD > len(self._data):
            raise InvalidRequest(f"the shard ends after {len(self._data)} bytes, in the middle of {count} records")
        found = np.frombuffer(self._data, dtype=dtype, count=count, offset=self._at)
        self._at += count * RECORD
        return found

    def head(self) -> tuple[bytes, int, int, int, int] | None:
        """(hash, flags, n, u32, u32) of the next file or xorb; None at a bookend."""
        record = self.take(1, TERM).tobytes()
        name, *rest = struct.unpack("<32s4I", record)
        return None if name == _BOOKEND else (name, rest[0], rest[1], rest[2], rest[3])


def _file(reader: _Reader, name: bytes, flags: int, count: int, *_: int) -> ShardFile:
    terms = reader.take(count, TERM)
    if flags & _VERIFIED:
        reader.take(count, TERM)
    sha256 = reader.take(1, TERM)["xorb"].tobytes() if flags & _WITH_SHA256 else None
    return ShardFile(name, sha256, terms)


def first_words(records: Records, field: str) -> NDArray[np.uint64]:
    """The first u64 of each hash in `field`."""
    return np.ascontiguousarray(records[field]).view("<u8").reshape(-1, 4)[:, 0].astype(np.uint64)


def shared_chunks(xorb: ShardXorb) -> list[bytes]:
    """The chunks by which other uploads may find this xorb: marked by the client, or last u64 divisible by 1024."""
    last = np.ascontiguousarray(xorb.chunks["hash"]).view("<u8").reshape(-1, 4)[:, 3]
    chosen = (xorb.chunks["flags"] & np.uint32(_SHARED) != 0) | (last % 1024 == 0)
    return [xorb.chunks["hash"][n].tobytes() for n in np.flatnonzero(chosen)]


def write_shard(xorbs: Sequence[ShardXorb], created: int, expires: int) -> bytes:
    """A shard that describes `xorbs` and no file, with lookup tables and footer; times in seconds since 1970."""
    bookend = _BOOKEND + bytes(RECORD - 32)
    parts = [_TAG, struct.pack("<QQ", _VERSION, _FOOTER_SIZE), bookend]
    xorb_table, chunk_tables, at = [], [], 0
    for xorb in xorbs:
        count, content = len(xorb.chunks), int(xorb.chunks["length"].sum(dtype=np.int64))
        parts += [xorb.hash, struct.pack("<4I", 0, count, content, xorb.packed_size), xorb.chunks.tobytes()]
        xorb_table.append((int.from_bytes(xorb.hash[:8], "little"), at))
        table = np.zeros(count, dtype=[("word", "<u8"), ("xorb", "<u4"), ("chunk", "<u4")])
        table["word"], table["xorb"], table["chunk"] = first_words(xorb.chunks, "hash"), at, np.arange(count)
        chunk_tables.append(table)
        at += 1 + count
    parts.append(bookend)
    chunk_table = np.concatenate(chunk_tables)
    chunk_table.sort(order="word", kind="stable")
    xorbs_at = 2 * RECORD
    tables_at = xorbs_at + (at + 1) * RECORD
    chunks_at = tables_at + 12 * len(xorbs)
    footer_at = chunks_at + 16 * len(chunk_table)
    parts += [struct.pack("<QI", word, index) for word, index in sorted(xorb_table)]
    parts.append(chunk_table.tobytes())
    parts.append(
        struct.pack(
            "<9Q32s2Q48x4Q",
            _FOOTER_VERSION, RECORD, xorbs_at, tables_at, 0, tables_at, len(xorbs), chunks_at, len(chunk_table),
            bytes(32), created, expires,
            sum(xorb.packed_size for xorb in xorbs), 0, sum(int(x.chunks["length"].sum()) for x in xorbs), footer_at,
        )
    )  # fmt: skip
    return b"".join(parts)
