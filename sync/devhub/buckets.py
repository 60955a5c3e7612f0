"""Buckets as they are kept: entries that name contents by hash, and the changes of the last hour.

Every change is one transaction and is on disk before the call returns. Entries are found by an index over the bytes of
their paths, so that a listing costs what it shows. The changes show a bucket as it was, and feed the event stream.
"""

from __future__ import annotations

import heapq
import re
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, NamedTuple

from .database import Database
from .responses import HubError, not_found, now_ms

SCHEMA = """
CREATE TABLE IF NOT EXISTS buckets (
    key INTEGER PRIMARY KEY AUTOINCREMENT, namespace TEXT NOT NULL, name TEXT NOT NULL, private INTEGER NOT NULL,
    created INTEGER NOT NULL, updated INTEGER NOT NULL, size INTEGER NOT NULL DEFAULT 0,
    files INTEGER NOT NULL DEFAULT 0, pruned INTEGER NOT NULL DEFAULT 0, UNIQUE (namespace, name)
);
CREATE TABLE IF NOT EXISTS bucket_entries (
    bucket INTEGER NOT NULL REFERENCES buckets (key) ON DELETE CASCADE, path BLOB NOT NULL, hash TEXT NOT NULL,
    size INTEGER NOT NULL, mtime INTEGER, uploaded INTEGER NOT NULL, content_type TEXT, PRIMARY KEY (bucket, path)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS bucket_changes (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, bucket INTEGER NOT NULL REFERENCES buckets (key) ON DELETE CASCADE,
    at INTEGER NOT NULL, path BLOB NOT NULL, op TEXT NOT NULL,
    hash TEXT, size INTEGER, mtime INTEGER,
    old_hash TEXT, old_size INTEGER, old_mtime INTEGER, old_uploaded INTEGER, old_content_type TEXT
);
CREATE INDEX IF NOT EXISTS bucket_changes_by_bucket ON bucket_changes (bucket, at);
CREATE INDEX IF NOT EXISTS bucket_changes_by_time ON bucket_changes (at);
"""

MAX_PATH_BYTES = 1024
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_HASH = re.compile(r"[0-9a-f]{64}")
_BUCKET = "SELECT key, namespace, name, private, created, updated, size, files, pruned FROM buckets "
_ENTRY = "SELECT path, hash, size, mtime, uploaded, content_type FROM bucket_entries WHERE bucket = ? "


class Bucket(NamedTuple):
    """A bucket as it is listed. Times in milliseconds since 1970; `pruned`: the last change that was forgotten."""

    key: int
    namespace: str
    name: str
    private: bool
    created: int
    updated: int
    size: int
    files: int
    pruned: int

    @property
    def id(self) -> str:
        """namespace/name."""
        return f"{self.namespace}/{self.name}"


class Entry(NamedTuple):
    """A file of a bucket. Times in milliseconds since 1970: `mtime` the client's, `uploaded` the server's."""

    path: str
    hash: str
    size: int
    mtime: int | None
    uploaded: int
    content_type: str | None


class Operation(NamedTuple):
    """One line of a batch. `hash` and `source` are for `put`: a copy names the type and id that hold its contents.

    `error`: why it fails already.
    """

    kind: Literal["put", "delete"]
    path: str
    hash: str = ""
    mtime: int | None = None
    content_type: str | None = None
    source: tuple[str, str] | None = None
    error: str | None = None


class Change(NamedTuple):
    """One change of an entry, as the event stream tells it."""

    seq: int
    at: int
    path: str
    op: Literal["add", "update", "delete"]
    hash: str | None
    size: int | None
    mtime: int | None


class Failure(NamedTuple):
    """An operation that was not applied."""

    path: str
    error: str


def check_path(path: object) -> str | None:
    """Why `path` cannot be the path of a file, or None."""
    if not isinstance(path, str) or not path:
        return "the path is empty or not a text"
    try:
        length = len(path.encode())
    except UnicodeEncodeError:
        return "the path is not valid Unicode"
    if length > MAX_PATH_BYTES:
        return f"the path has {length} bytes, the limit is {MAX_PATH_BYTES}"
    if any(part in ("", ".", "..") for part in path.split("/")):
        return "the path has an empty part, a '.' or a '..'"
    if any(ord(c) < 32 or ord(c) == 127 for c in path):
        return "the path has a control character"
    return None


def after_prefix(prefix: bytes) -> bytes | None:
    """The smallest key above every key that starts with `prefix`; None: there is none."""
    cut = prefix.rstrip(b"\xff")
    return cut[:-1] + bytes([cut[-1] + 1]) if cut else None


class View:
    """The entries of one bucket at one moment, within a database snapshot. `past`: what differed then, by path."""

    def __init__(self, connection: sqlite3.Connection, bucket: int, past: dict[bytes, Entry | None]) -> None:
        self._connection = connection
        self._bucket = bucket
        self._past = past

    def get(self, path: str) -> Entry | None:
        """The entry at `path`."""
        key = path.encode("utf-8", "replace")
        if key in self._past:
            return self._past[key]
        row = self._connection.execute(_ENTRY + "AND path = ?", (self._bucket, key)).fetchone()
        return _entry(row) if row else None

    def scan(self, lower: bytes, upper: bytes | None, chunk: int = 1000) -> Iterator[Entry]:
        """The entries from `lower` up to, not including, `upper`, in the order of their paths' bytes."""
        if not self._past:
            yield from self._current(lower, upper, chunk)
            return
        inside = sorted(k for k in self._past if k >= lower and (upper is None or k < upper))
        past = (entry for key in inside if (entry := self._past[key]) is not None)
        present = (e for e in self._current(lower, upper, chunk) if e.path.encode() not in self._past)
        yield from heapq.merge(past, present, key=lambda e: e.path.encode())

    def latest(self, lower: bytes, upper: bytes) -> int:
        """The newest upload time between two keys."""
        if self._past:
            return max((e.uploaded for e in self.scan(lower, upper)), default=0)
        sql = "SELECT max(uploaded) FROM bucket_entries WHERE bucket = ? AND path >= ? AND path < ?"
        return int(self._connection.execute(sql, (self._bucket, lower, upper)).fetchone()[0] or 0)

    def _current(self, lower: bytes, upper: bytes | None, chunk: int) -> Iterator[Entry]:
        bound, extra = ("AND path < ? ", (upper,)) if upper is not None else ("", ())
        sql = _ENTRY + f"AND path >= ? {bound}ORDER BY path LIMIT ?"
        while True:
            rows = self._connection.execute(sql, (self._bucket, lower, *extra, chunk)).fetchall()
            yield from map(_entry, rows)
            if len(rows) < chunk:
                return
            lower = rows[-1][0] + b"\0"


class Buckets:
    """All buckets of a Hub. `size_of` tells the size of contents by their hash, None when they are not stored.

    `on_change` is called with a bucket's key after a change was committed. Thread-safe.
    """

    def __init__(self, db: Database, size_of: Callable[[str], int | None], *, history_seconds: float = 3600.0) -> None:
        self._db = db
        self._size_of = size_of
        self._history_ms = int(history_seconds * 1000)
        self.on_change: Callable[[int], None] = lambda _key: None

    def create(self, namespace: str, name: str, *, private: bool) -> tuple[Bucket, bool]:
        """The bucket, and whether it is new. Raises HubError 400 for a name that cannot be one."""
        if not _NAME.fullmatch(namespace) or not _NAME.fullmatch(name):
            raise HubError(400, f"{namespace}/{name} is no bucket name: letters, digits, '.', '_' and '-' only")
        now = now_ms()
        with self._db.write() as connection:
            sql = "INSERT OR IGNORE INTO buckets (namespace, name, private, created, updated) VALUES (?, ?, ?, ?, ?)"
            made = connection.execute(sql, (namespace, name, private, now, now)).rowcount == 1
            return _find(connection, namespace, name), made

    def find(self, namespace: str, name: str) -> Bucket:
        """The bucket; raises HubError 404."""
        return _find(self._db.read(), namespace, name)

    def listed(self, namespace: str | None = None, *, after: str = "", search: str = "") -> Iterator[Bucket]:
        """Buckets of one namespace or of all, in the order of their ids, from the one after the id `after`."""
        sql = _BUCKET + "WHERE namespace || '/' || name > ? AND instr(lower(name), lower(?)) > 0"
        values: list[str] = [after, search]
        if namespace is not None:
            sql += " AND namespace = ?"
            values.append(namespace)
        rows = self._db.read().execute(sql + " ORDER BY namespace || '/' || name", values).fetchall()
        yield from map(_bucket, rows)

    def delete(self, bucket: Bucket) -> None:
        """Delete a bucket with all it holds."""
        with self._db.write() as connection:
            connection.execute("DELETE FROM buckets WHERE key = ?", (bucket.key,))
        self.on_change(bucket.key)

    def set_private(self, bucket: Bucket, *, private: bool) -> None:
        """Change who sees a bucket."""
        with self._db.write() as connection:
            connection.execute("UPDATE buckets SET private = ? WHERE key = ?", (private, bucket.key))

    def move(self, bucket: Bucket, namespace: str, name: str) -> None:
        """Rename a bucket; raises HubError 400 for a bad name and 409 when the new one is taken."""
        if not _NAME.fullmatch(namespace) or not _NAME.fullmatch(name):
            raise HubError(400, f"{namespace}/{name} is no bucket name: letters, digits, '.', '_' and '-' only")
        with self._db.write() as connection:
            try:
                sql = "UPDATE buckets SET namespace = ?, name = ? WHERE key = ?"
                connection.execute(sql, (namespace, name, bucket.key))
            except sqlite3.IntegrityError:
                raise HubError(409, f"the bucket {namespace}/{name} exists already; choose another name") from None

    def apply(self, bucket: Bucket, operations: Sequence[Operation]) -> list[Failure]:
        """Apply operations in their order, in one transaction; returns those that failed. Deleting nothing succeeds.

        Raises HubError 404 when the bucket was deleted meanwhile.
        """
        sized = [_sized(operation, self._size_of) for operation in operations]
        failures = [Failure(op.path, size) for op, size in sized if isinstance(size, str)]
        with self._db.write() as connection:
            present = _find_key(connection, bucket.key)
            at = max(now_ms(), present.updated + 1)
            size, files = present.size, present.files
            for operation, new_size in sized:
                if isinstance(new_size, int):
                    grown, more = _apply(connection, bucket.key, operation, new_size, at)
                    size, files = size + grown, files + more
            sql = "UPDATE buckets SET size = ?, files = ?, updated = ? WHERE key = ?"
            connection.execute(sql, (size, files, at, bucket.key))
            _prune(connection, at - self._history_ms)
        self.on_change(bucket.key)
        return failures

    @contextmanager
    def view(self, bucket: Bucket, *, seconds_ago: float | None = None) -> Iterator[View]:
        """The entries of a bucket, now or as they were at most `history_seconds` ago."""
        with self._db.snapshot() as connection:
            past: dict[bytes, Entry | None] = {}
            if seconds_ago is not None:
                then = now_ms() - int(seconds_ago * 1000)
                sql = (
                    "SELECT path, old_hash, old_size, old_mtime, old_uploaded, old_content_type FROM bucket_changes "
                    "WHERE bucket = ? AND at > ? ORDER BY seq DESC"
                )
                for row in connection.execute(sql, (bucket.key, then)):
                    past[row[0]] = _entry(row) if row[1] is not None else None
            yield View(connection, bucket.key, past)

    def changes(self, bucket: Bucket, *, after: int = 0, since: int = 0, limit: int = 1000) -> list[Change]:
        """Up to `limit` changes with a number above `after` and a time above `since`, oldest first."""
        sql = (
            "SELECT seq, at, path, op, hash, size, mtime FROM bucket_changes "
            "WHERE bucket = ? AND seq > ? AND at > ? ORDER BY seq LIMIT ?"
        )
        rows = self._db.read().execute(sql, (bucket.key, after, since, limit)).fetchall()
        return [Change(row[0], row[1], row[2].decode(), *row[3:]) for row in rows]

    def last_change(self, bucket: Bucket) -> int:
        """The number of the newest change of a bucket that is remembered, else of the last forgotten one."""
        sql = "SELECT max(seq) FROM bucket_changes WHERE bucket = ?"
        return int(self._db.read().execute(sql, (bucket.key,)).fetchone()[0] or bucket.pruned)

    def alive(self, bucket: Bucket) -> bool:
        """Whether the bucket still exists."""
        return self._db.read().execute("SELECT 1 FROM buckets WHERE key = ?", (bucket.key,)).fetchone() is not None


def _sized(operation: Operation, size_of: Callable[[str], int | None]) -> tuple[Operation, int | str]:
    """The operation with the size of what it puts, or with the reason why it fails."""
    error = operation.error or check_path(operation.path)
    if error:
        return operation, error
    if operation.kind == "delete":
        return operation, 0
    if not _HASH.fullmatch(operation.hash):
        return operation, "xetHash must be 64 lower-case hex digits"
    size = size_of(operation.hash)
    return operation, "no contents with this xetHash were uploaded" if size is None else size


def _apply(connection: sqlite3.Connection, bucket: int, operation: Operation, size: int, at: int) -> tuple[int, int]:
    """Apply one checked operation and note the change; returns by how much bytes and files grew."""
    key = operation.path.encode()
    row = connection.execute(_ENTRY + "AND path = ?", (bucket, key)).fetchone()
    old = _entry(row) if row else None
    if operation.kind == "delete" and old is None:
        return 0, 0
    if operation.kind == "delete":
        op = "delete"
        connection.execute("DELETE FROM bucket_entries WHERE bucket = ? AND path = ?", (bucket, key))
        new: tuple[str | int | None, ...] = (None, None, None)
    else:
        op = "update" if old else "add"
        new = (operation.hash, size, operation.mtime)
        sql = "INSERT OR REPLACE INTO bucket_entries VALUES (?, ?, ?, ?, ?, ?, ?)"
        connection.execute(sql, (bucket, key, *new, at, operation.content_type))
    before = old[1:] if old else (None,) * 5
    connection.execute(
        "INSERT INTO bucket_changes (bucket, at, path, op, hash, size, mtime, old_hash, old_size, old_mtime, "
        "old_uploaded, old_content_type) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (bucket, at, key, op, *new, *before),
    )
    present = operation.kind == "put"
    return (size if present else 0) - (old.size if old else 0), int(present) - int(old is not None)


def _prune(connection: sqlite3.Connection, before: int) -> None:
    sql = "SELECT bucket, max(seq) FROM bucket_changes WHERE at < ? GROUP BY bucket"
    forgotten: Iterable[tuple[int, int]] = connection.execute(sql, (before,)).fetchall()
    for bucket, seq in forgotten:
        connection.execute("UPDATE buckets SET pruned = ? WHERE key = ?", (seq, bucket))
        connection.execute("DELETE FROM bucket_changes WHERE bucket = ? AND at < ?", (bucket, before))


def _find(connection: sqlite3.Connection, namespace: str, name: str) -> Bucket:
    row = connection.execute(_BUCKET + "WHERE namespace = ? AND name = ?", (namespace, name)).fetchone()
    if row is None:
        raise not_found(f"Bucket {namespace}/{name}")
    return _bucket(row)


def _find_key(connection: sqlite3.Connection, key: int) -> Bucket:
    row = connection.execute(_BUCKET + "WHERE key = ?", (key,)).fetchone()
    if row is None:
        raise not_found("Bucket")
    return _bucket(row)


def _bucket(row: tuple[int, str, str, int, int, int, int, int, int]) -> Bucket:
    return Bucket(*row[:3], bool(row[3]), *row[4:])


def _entry(row: tuple[bytes, str, int, int | None, int, str | None]) -> Entry:
    return Entry(row[0].decode(), *row[1:])
