"""One SQLite file for everything that the Hub remembers besides file contents.

WAL with synchronous=FULL: what a `write` block did is on disk when the block is left, also when the process is killed
right after. Each owner module brings its own tables as a `SCHEMA` string of `CREATE … IF NOT EXISTS` statements.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ..errors import ConfigError

VERSION = 1
BUSY_SECONDS = 30.0


class Database:
    """The file at `path`, created when missing. Thread-safe: one writer at a time, one reading connection per thread.

    Raises ConfigError when the file cannot be opened or was written by a newer release.
    """

    def __init__(self, path: Path, schemas: Sequence[str]) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._guard = threading.Lock()
        self._local = threading.local()
        self._readers: dict[threading.Thread, sqlite3.Connection] = {}
        try:
            self._writer = self._connect()
        except sqlite3.Error as error:
            raise ConfigError(f"{path}: cannot be opened ({error}); give another --data folder") from None
        try:
            self._prepare(schemas)
        except sqlite3.Error as error:
            self.close()
            raise ConfigError(f"{path}: cannot be used ({error}); give another --data folder") from None
        except BaseException:
            self.close()
            raise

    @contextmanager
    def write(self) -> Iterator[sqlite3.Connection]:
        """One transaction, alone: committed when the block ends, rolled back when it raises. Do not nest."""
        with self._lock:
            self._writer.execute("BEGIN IMMEDIATE")
            try:
                yield self._writer
                self._writer.execute("COMMIT")
            except BaseException:
                if self._writer.in_transaction:
                    self._writer.execute("ROLLBACK")
                raise

    def read(self) -> sqlite3.Connection:
        """This thread's reading connection; each statement sees the newest committed state.

        One of a thread that has ended is used again: worker threads come and go.
        """
        connection: sqlite3.Connection | None = getattr(self._local, "connection", None)
        if connection is None:
            with self._guard:
                ended = next((thread for thread in self._readers if not thread.is_alive()), None)
                connection = self._connect() if ended is None else self._readers.pop(ended)
                connection.execute("PRAGMA query_only = ON")
                self._readers[threading.current_thread()] = self._local.connection = connection
        return connection

    @contextmanager
    def snapshot(self) -> Iterator[sqlite3.Connection]:
        """Like `read`, and all statements of the block see one state. Do not nest within a thread."""
        connection = self.read()
        connection.execute("BEGIN")
        try:
            yield connection
        finally:
            connection.execute("COMMIT")

    def close(self) -> None:
        """Close every connection; call it when no other thread uses the database any more."""
        with self._guard:
            for connection in self._readers.values():
                connection.close()
            self._readers.clear()
        self._writer.close()

    def _prepare(self, schemas: Sequence[str]) -> None:
        found = int(self._writer.execute("PRAGMA user_version").fetchone()[0])
        if found not in (0, VERSION):
            raise ConfigError(
                f"{self._path}: layout {found}, this release knows {VERSION}; use the release that wrote it"
            )
        for schema in schemas:
            self._writer.executescript(schema)
        self._writer.execute(f"PRAGMA user_version = {VERSION}")

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self._path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute("PRAGMA foreign_keys = ON")
        except BaseException:
            connection.close()
            raise
        return connection
