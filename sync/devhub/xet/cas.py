"""The store: xorbs as files named by their hash, and an index of what is in them and which files they make up.

A xorb becomes known after its file is on disk under its final name; a file becomes known when the shard that describes
it was checked against the xorbs, in one transaction. A process killed at any point leaves at most files that nothing
names, which the next upload of the same xorb replaces. Nothing is ever deleted.

What is not checked: that a hash is the hash of its content. Clients compute it; whoever may write is
trusted that far.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
import sqlite3
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import numpy as np

from ...errors import CorruptObject, InvalidRequest, ObjectMissing
from ..database import Database
from .formats import EMPTY_FILE, Layout, hash_bytes, hash_hex, unpack, walk
from .reconstruction import Plan, Term, make_plan
from .shards import CHUNK, TERM, Records, ShardFile, ShardXorb, parse_shard, shared_chunks, write_shard

SCHEMA = """
CREATE TABLE IF NOT EXISTS secret (value BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS shards (id INTEGER PRIMARY KEY, digest BLOB NOT NULL UNIQUE);
CREATE TABLE IF NOT EXISTS xorbs (
    hash BLOB PRIMARY KEY, size INTEGER NOT NULL, layout BLOB NOT NULL,
    shard INTEGER REFERENCES shards (id), chunks BLOB -- as the first shard that described it has them
);
CREATE INDEX IF NOT EXISTS xorbs_shard ON xorbs (shard) WHERE shard IS NOT NULL;
CREATE TABLE IF NOT EXISTS files (hash BLOB PRIMARY KEY, size INTEGER NOT NULL, sha256 BLOB, terms BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS files_sha256 ON files (sha256) WHERE sha256 IS NOT NULL;
CREATE TABLE IF NOT EXISTS chunks (hash BLOB PRIMARY KEY, xorb BLOB NOT NULL) WITHOUT ROWID;
"""

PIECE = 1 << 20
"""Bytes that `read` yields at most at once."""
ANSWER_XORBS = 64
"""Xorbs that the answer to one chunk query describes at most: up to 4 GiB of content in 3 MB."""
ANSWER_SECONDS = 7 * 86400
"""How long clients may keep such an answer."""
_EMPTY_SHA256 = hashlib.sha256(b"").hexdigest()


class Cas:
    """The store in `folder`, created when missing. Thread-safe; one process per folder.

    Hashes are 64 hexadecimal digits as hf_xet prints them; 64 zeros are the empty file, which is always there. Every
    method that takes one raises InvalidRequest when it is something else.
    """

    def __init__(self, folder: Path) -> None:
        self._xorbs = folder / "xorbs"
        self.tmp = folder / "tmp"
        self._xorbs.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(self.tmp, ignore_errors=True)
        self.tmp.mkdir()
        index = folder / "index.sqlite3"
        os.close(os.open(index, os.O_CREAT | os.O_RDWR, 0o600))
        self._db = Database(index, [SCHEMA])
        self._publishing = threading.Lock()
        self._parsing = threading.Lock()
        self._layout = lru_cache(512)(self._load_layout)
        self.secret = self._load_secret()

    def close(self) -> None:
        """Close the index; call it when no other thread uses the store any more."""
        self._db.close()

    # Files

    def size(self, file_hash: str) -> int | None:
        """Bytes of a file; None when there is no such file."""
        if file_hash == EMPTY_FILE:
            return 0
        row = self._db.read().execute("SELECT size FROM files WHERE hash = ?", (hash_bytes(file_hash),)).fetchone()
        return None if row is None else int(row[0])

    def sha256(self, file_hash: str) -> str | None:
        """The sha256 of a file where its uploader told it; None else, and when there is no such file."""
        if file_hash == EMPTY_FILE:
            return _EMPTY_SHA256
        row = self._db.read().execute("SELECT sha256 FROM files WHERE hash = ?", (hash_bytes(file_hash),)).fetchone()
        return None if row is None or row[0] is None else hash_hex(row[0])

    def by_sha256(self, sha256: str) -> str | None:
        """The file with this sha256, as its uploader told it; where several claim it, the one that was found to."""
        if sha256 in (_EMPTY_SHA256, EMPTY_FILE):  # hf_xet gives 64 zeros as the sha256 of an empty file
            return EMPTY_FILE
        rows = self._db.read().execute("SELECT hash FROM files WHERE sha256 = ?", (hash_bytes(sha256),)).fetchall()
        names = [hash_hex(row[0]) for row in rows]
        if len(names) < 2:
            return names[0] if names else None
        true = {name: self._digest(name) for name in names}
        with self._db.write() as connection:
            for name, digest in true.items():
                values = (digest and hash_bytes(digest), hash_bytes(name))
                connection.execute("UPDATE files SET sha256 = ? WHERE hash = ?", values)
        return next((name for name, digest in true.items() if digest == sha256), None)

    def read(self, file_hash: str, start: int = 0, end: int | None = None) -> Iterator[bytes]:
        """The bytes of a file from `start` to `end` (exclusive; None: its end), in pieces of at most 1 MiB.

        A range beyond the file is cut to it. Raises ObjectMissing at once when there is no such file, and CorruptObject
        on the way when a chunk does not unpack.
        """
        size = self.size(file_hash)
        if size is None:
            raise ObjectMissing(f"no file {file_hash} in the store; upload it first")
        stop = size if end is None else min(end, size)
        if not 0 <= start < stop:
            return iter(())
        return self._pieces(self.plan(file_hash, start, stop), stop - start)

    def plan(self, file_hash: str, start: int, end: int) -> Plan:
        """What a client must fetch for the bytes from `start` to `end`, with 0 <= start < end <= size.

        Raises ObjectMissing when there is no such file.
        """
        row = self._db.read().execute("SELECT terms FROM files WHERE hash = ?", (hash_bytes(file_hash),)).fetchone()
        if row is None:
            raise ObjectMissing(f"no file {file_hash} in the store; upload it first")
        return make_plan(np.frombuffer(row[0], dtype=TERM), self.layout, start, end)

    def _pieces(self, plan: Plan, wanted: int) -> Iterator[bytes]:
        skip = plan.skip
        for term in plan.terms:
            for piece in self._term(term):
                data = piece[skip : skip + wanted]
                skip = 0
                wanted -= len(data)
                yield data

    def _term(self, term: Term) -> Iterator[bytes]:
        """The chunks of a term, unpacked and joined to pieces of at most PIECE bytes."""
        layout = self.layout(term.xorb)
        with self.xorb_path(term.xorb).open("rb", buffering=0) as file:
            start = term.start
            while start < term.end:
                reach = int(layout.content[start]) + PIECE
                end = min(term.end, int(np.searchsorted(layout.content, reach, side="right")) - 1)
                first, last = int(layout.packed[start]), int(layout.packed[end])
                packed = os.pread(file.fileno(), last - first, first)
                yield b"".join(unpack(memoryview(packed), layout, start, end))
                start = end

    def _digest(self, file_hash: str) -> str | None:
        """The sha256 of what is stored; None when it does not unpack."""
        digest = hashlib.sha256()
        try:
            for piece in self.read(file_hash):
                digest.update(piece)
        except CorruptObject:
            return None
        return digest.hexdigest()

    # Xorbs. Inside the store, hashes are raw bytes.

    def has_xorb(self, xorb: bytes) -> bool:
        """Whether a xorb is there whole."""
        return self._db.read().execute("SELECT 1 FROM xorbs WHERE hash = ?", (xorb,)).fetchone() is not None

    def xorb_path(self, xorb: bytes) -> Path:
        """Where a xorb that `has_xorb` lies."""
        name = hash_hex(xorb)
        return self._xorbs / name[:2] / name

    def layout(self, xorb: bytes) -> Layout:
        """Where the chunks of a xorb lie; the newest ones asked for are kept. Raises InvalidRequest when unknown."""
        return self._layout(xorb)

    def new_file(self) -> tuple[int, Path]:
        """(open descriptor, path) of a new file for `add_xorb`; the caller closes it, and unlinks it if left."""
        descriptor, path = tempfile.mkstemp(dir=self.tmp)
        return descriptor, Path(path)

    def add_xorb(self, xorb: bytes, descriptor: int, path: Path) -> bool:
        """Take over a temporary file as a xorb; it is on disk when this returns. False: it was there already.

        Raises InvalidRequest when the file is not a xorb.
        """
        size = os.fstat(descriptor).st_size
        layout = walk(descriptor, size)
        os.fsync(descriptor)
        target = self.xorb_path(xorb)
        with self._publishing:
            if self.has_xorb(xorb):
                return False
            if not target.parent.exists():
                target.parent.mkdir()
                _sync_folder(self._xorbs)
            path.replace(target)
            _sync_folder(target.parent)
            with self._db.write() as connection:
                values = (xorb, size, layout.to_bytes())
                connection.execute("INSERT INTO xorbs (hash, size, layout) VALUES (?, ?, ?)", values)
        return True

    def _load_layout(self, xorb: bytes) -> Layout:
        row = self._db.read().execute("SELECT layout FROM xorbs WHERE hash = ?", (xorb,)).fetchone()
        if row is None:
            raise InvalidRequest(f"no xorb {hash_hex(xorb)} in the store; upload it before the shard that names it")
        return Layout.from_bytes(row[0])

    # Shards

    def add_shard(self, path: Path) -> bool:
        """Take over what the shard in a file says, after it was checked against the xorbs. False: it was there already.

        Raises InvalidRequest; nothing of the shard is known then.
        """
        with self._parsing:
            body = path.read_bytes()
            digest = hashlib.sha256(body).digest()
            if self._db.read().execute("SELECT 1 FROM shards WHERE digest = ?", (digest,)).fetchone():
                return False
            files, xorbs = parse_shard(body)
            for xorb in xorbs:
                self._check_xorb(xorb)
            for file in files:
                self._check_file(file)
            files = [replace(file, sha256=self._settled(file)) for file in files]
            with self._db.write() as connection:
                _record(connection, digest, files, xorbs)
        return True

    def _check_xorb(self, xorb: ShardXorb) -> None:
        layout = self.layout(xorb.hash)
        same = len(xorb.chunks) == layout.chunks and np.array_equal(xorb.chunks["length"], np.diff(layout.content))
        if not same or not np.array_equal(xorb.chunks["offset"], layout.content[:-1]):
            raise InvalidRequest(
                f"the shard's chunks of xorb {hash_hex(xorb.hash)} are not those that were uploaded "
                f"({len(xorb.chunks)} and {layout.chunks}); upload the file again"
            )

    def _check_file(self, file: ShardFile) -> None:
        for n, term in enumerate(file.terms):
            layout = self.layout(term["xorb"].tobytes())
            start, end, length = int(term["start"]), int(term["end"]), int(term["length"])
            where = f"file {hash_hex(file.hash)}, term {n}"
            if not start < end <= layout.chunks:
                raise InvalidRequest(f"{where}: chunks {start} to {end} of a xorb that has {layout.chunks}")
            if length != layout.length(start, end):
                raise InvalidRequest(f"{where}: {length} bytes announced, its chunks have {layout.length(start, end)}")

    def _settled(self, file: ShardFile) -> bytes | None:
        """The sha256 that a shard gives; the one that is found where another shard gave another one."""
        known = self.sha256(hash_hex(file.hash))
        if known is None or file.sha256 in (None, hash_bytes(known)):
            return file.sha256
        found = self._digest(hash_hex(file.hash))
        return None if found is None else hash_bytes(found)

    def find_chunk(self, chunk_hash: str) -> bytes | None:
        """A shard that describes the xorb with this chunk and those uploaded with it; None when nobody shared it."""
        connection = self._db.read()
        row = connection.execute(
            "SELECT xorbs.rowid, xorbs.shard FROM chunks JOIN xorbs ON xorbs.hash = chunks.xorb WHERE chunks.hash = ?",
            (hash_bytes(chunk_hash),),
        ).fetchone()
        if row is None:
            return None
        rows = connection.execute(
            "SELECT hash, size, chunks FROM xorbs WHERE shard = ? ORDER BY rowid < ?, rowid LIMIT ?",
            (row[1], row[0], ANSWER_XORBS),
        ).fetchall()
        now = int(time.time())
        return write_shard(
            [ShardXorb(name, size, _chunks(data)) for name, size, data in rows], now, now + ANSWER_SECONDS
        )

    def _load_secret(self) -> bytes:
        with self._db.write() as connection:
            row = connection.execute("SELECT value FROM secret").fetchone()
            if row is None:
                row = (secrets.token_bytes(32),)
                connection.execute("INSERT INTO secret (value) VALUES (?)", row)
        return bytes(row[0])


def _record(
    connection: sqlite3.Connection, digest: bytes, files: Sequence[ShardFile], xorbs: Sequence[ShardXorb]
) -> None:
    """Write a shard that was checked into the index. What is known of a xorb or a file already stays."""
    shard = connection.execute("INSERT INTO shards (digest) VALUES (?)", (digest,)).lastrowid
    connection.executemany(
        "UPDATE xorbs SET shard = ?, chunks = ? WHERE hash = ? AND chunks IS NULL",
        ((shard, xorb.chunks.tobytes(), xorb.hash) for xorb in xorbs),
    )
    connection.executemany(
        "INSERT INTO files (hash, size, sha256, terms) VALUES (?, ?, ?, ?) "
        "ON CONFLICT (hash) DO UPDATE SET sha256 = coalesce(excluded.sha256, files.sha256)",
        ((file.hash, file.size, file.sha256, file.terms.tobytes()) for file in files),
    )
    shared = [(chunk, xorb.hash) for xorb in xorbs for chunk in shared_chunks(xorb)]
    for name, start in {_first_chunk(file) for file in files if len(file.terms)}:
        (chunks,) = connection.execute("SELECT chunks FROM xorbs WHERE hash = ?", (name,)).fetchone()
        if chunks is not None:  # else its own shard is still on the way
            shared.append((_chunks(chunks)["hash"][start].tobytes(), name))
    connection.executemany("INSERT OR IGNORE INTO chunks (hash, xorb) VALUES (?, ?)", shared)


def _first_chunk(file: ShardFile) -> tuple[bytes, int]:
    """(xorb, index of the chunk) with which a file begins: a machine that never saw the file asks for this one."""
    return file.terms[0]["xorb"].tobytes(), int(file.terms[0]["start"])


def _chunks(data: bytes) -> Records:
    return np.frombuffer(data, dtype=CHUNK)


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
