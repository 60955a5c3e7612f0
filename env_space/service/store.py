"""Everything of the rollout service that survives a kill, in one SQLite file (WAL). Used from one thread at a time."""

from __future__ import annotations

import fcntl
import json
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NamedTuple

from pydantic_core import to_json

from sync.errors import ConfigError, StoreUnavailable
from sync.schema.rollouts import HarnessVersions, Rollout, RolloutPage, RolloutSummary, RunRequest

SCHEMA_VERSION = 1
_SCHEMA = """
CREATE TABLE runs (name TEXT PRIMARY KEY, request TEXT NOT NULL, stopped INTEGER NOT NULL DEFAULT 0,
    cursor INTEGER NOT NULL DEFAULT 0, counters TEXT NOT NULL DEFAULT '{}') WITHOUT ROWID;
CREATE TABLE started (run TEXT NOT NULL, seq INTEGER NOT NULL, task TEXT NOT NULL, harness TEXT NOT NULL,
    PRIMARY KEY (run, seq)) WITHOUT ROWID;
CREATE TABLE groups (position INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, run TEXT NOT NULL,
    task TEXT NOT NULL, harness TEXT NOT NULL, acked INTEGER NOT NULL DEFAULT 0, size INTEGER NOT NULL);
CREATE INDEX groups_acked ON groups (acked, position);
CREATE TABLE rollouts (position INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, run TEXT NOT NULL,
    grp TEXT NOT NULL, task TEXT NOT NULL, environment TEXT NOT NULL, status TEXT NOT NULL, reward REAL,
    success INTEGER, version_min TEXT, version_max TEXT, tokens INTEGER NOT NULL, created_at REAL NOT NULL,
    body BLOB NOT NULL);
CREATE INDEX rollouts_run ON rollouts (run, position);
CREATE INDEX rollouts_run_status ON rollouts (run, status, position);
CREATE INDEX rollouts_status ON rollouts (status, position);
CREATE INDEX rollouts_group ON rollouts (grp);
"""
_DISK = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_BUSY)
_SUMMARY = "id, run, grp, task, environment, status, reward, success, version_min, version_max, tokens, created_at"


class StoredRun(NamedTuple):
    """A run as the disk knows it; `cursor` is the sequence number of its next new group."""

    request: RunRequest
    stopped: bool
    cursor: int
    counters: dict[str, int]


class Draw(NamedTuple):
    """A group that was started: its number within the run, its task and the harness it pinned."""

    seq: int
    task: str
    harness: HarnessVersions


class RolloutStore:
    """The database in `folder`, made when missing and locked against a second process.

    Raises ConfigError when another process holds the folder, or the file is damaged or not a database of this schema
    version.
    Every method that writes is one transaction; it raises StoreUnavailable, and nothing is changed, while the disk is
    full or fails.
    """

    def __init__(self, folder: Path) -> None:
        self._lock = _locked(folder)
        self._path = path = folder / "rollouts.sqlite"
        try:
            self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            try:
                self._prepare(path)
            except BaseException:
                self._db.close()
                raise
        except sqlite3.Error as error:
            self._lock.close()
            raise ConfigError(
                f"{path}: not a usable rollout database ({error}); move it away or choose --folder"
            ) from None
        except BaseException:
            self._lock.close()
            raise

    def _prepare(self, path: Path) -> None:
        damage = self._db.execute("PRAGMA quick_check(1)").fetchone()[0]
        if damage != "ok":
            raise sqlite3.DatabaseError(f"damaged: {damage}")
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = NORMAL")
        version = self._count("PRAGMA user_version")
        if version == 0:
            self._db.executescript(f"BEGIN; {_SCHEMA} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;")
        elif version != SCHEMA_VERSION:
            raise ConfigError(
                f"{path}: schema version {version}, this build reads {SCHEMA_VERSION}; choose another --folder"
            )
        self._acked = self._count("SELECT coalesce(sum(size), 0) FROM groups WHERE acked")

    def close(self) -> None:
        """Close the database and release the folder."""
        self._db.close()
        self._lock.close()

    def runs(self) -> list[StoredRun]:
        """All runs ever posted, by name."""
        rows = self._db.execute("SELECT request, stopped, cursor, counters FROM runs ORDER BY name")
        return [StoredRun(RunRequest.model_validate_json(r), bool(s), c, json.loads(n)) for r, s, c, n in rows]

    def put_run(self, request: RunRequest) -> None:
        """Store a new run, or start a stopped one of that name again."""
        with self._transaction():
            self._db.execute(
                "INSERT INTO runs (name, request) VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET stopped = 0",
                (request.name, request.model_dump_json()),
            )

    def stop_run(self, name: str) -> None:
        """Mark a run stopped; its groups in flight are rolled again when it is started again."""
        with self._transaction():
            self._db.execute("UPDATE runs SET stopped = 1 WHERE name = ?", (name,))

    def start_groups(self, run: str, draws: Sequence[Draw], counters: dict[str, int]) -> None:
        """Note groups as in flight and move the cursor past them."""
        with self._transaction():
            self._db.executemany(
                "INSERT INTO started VALUES (?, ?, ?, ?)",
                [(run, d.seq, d.task, d.harness.model_dump_json()) for d in draws],
            )
            self._db.execute("UPDATE runs SET cursor = ? WHERE name = ?", (draws[-1].seq + 1, run))
            self._save_counters(run, counters)

    def started(self, run: str) -> list[Draw]:
        """Groups that were in flight, oldest first."""
        rows = self._db.execute("SELECT seq, task, harness FROM started WHERE run = ? ORDER BY seq", (run,))
        return [Draw(seq, task, HarnessVersions.model_validate_json(h)) for seq, task, h in rows]

    def add_group(
        self, run: str, draw: Draw, group: str, rollouts: Sequence[Rollout], counters: dict[str, int]
    ) -> None:
        """Store a READY group with its rollouts (at least one) and take it out of flight."""
        with self._transaction():
            self._db.execute(
                "INSERT INTO groups (id, run, task, harness, size) VALUES (?, ?, ?, ?, ?)",
                (group, run, draw.task, draw.harness.model_dump_json(), len(rollouts)),
            )
            marks = ", ".join("?" * 13)
            self._db.executemany(
                f"INSERT INTO rollouts ({_SUMMARY}, body) VALUES ({marks})",  # noqa: S608 - constants only
                [_row(rollout) for rollout in rollouts],
            )
            self._close_group(run, draw.seq, counters)

    def drop_group(self, run: str, draw: Draw, counters: dict[str, int]) -> None:
        """Take a group out of flight without keeping it."""
        with self._transaction():
            self._close_group(run, draw.seq, counters)

    def ready(self) -> list[tuple[str, str, int]]:
        """(run, group id, size) of every group that is not acked, in the order they became READY."""
        return self._db.execute("SELECT run, id, size FROM groups WHERE NOT acked ORDER BY position").fetchall()

    def group_json(self, group: str) -> bytes:
        """The group as JSON (sync.schema.rollouts.Group), joined from the stored bytes."""
        run, task, harness = self._db.execute("SELECT run, task, harness FROM groups WHERE id = ?", (group,)).fetchone()
        rows = self._db.execute("SELECT body FROM rollouts WHERE grp = ? ORDER BY position", (group,))
        head = b'{"id":%s,"run":%s,"task":%s' % (to_json(group), to_json(run), to_json(task))
        return b'%s,"harness":%s,"rollouts":[%s]}' % (head, harness.encode(), b",".join(body for (body,) in rows))

    def ack(self, groups: Iterable[str], counters: dict[str, dict[str, int]], keep: int) -> None:
        """Mark groups as delivered, save the counters of their runs, and delete the oldest beyond `keep` rollouts."""
        acked = self._acked
        with self._transaction():
            for group in groups:
                row = self._db.execute(
                    "UPDATE groups SET acked = 1 WHERE id = ? AND NOT acked RETURNING size", (group,)
                )
                acked += sum(size for (size,) in row.fetchall())
            for run, values in counters.items():
                self._save_counters(run, values)
            acked -= self._trim(acked - keep)
        self._acked = acked

    def _trim(self, excess: int) -> int:
        """Delete the oldest acked groups with at least `excess` rollouts; returns how many rollouts that were."""
        deleted = 0
        while deleted < excess:
            oldest = "SELECT id, size FROM groups WHERE acked ORDER BY position LIMIT 1"
            group, size = self._db.execute(oldest).fetchone()
            self._db.execute("DELETE FROM rollouts WHERE grp = ?", (group,))
            self._db.execute("DELETE FROM groups WHERE id = ?", (group,))
            deleted += size
        return deleted

    def rollout_json(self, rollout: str) -> bytes | None:
        """One rollout as JSON, or None when it is unknown or deleted."""
        row = self._db.execute("SELECT body FROM rollouts WHERE id = ?", (rollout,)).fetchone()
        return row[0] if row else None

    def recent(self, run: str | None, status: str | None, offset: int, limit: int) -> RolloutPage:
        """A page of stored rollouts, newest first, of one run and status where given."""
        chosen = [(name, value) for name, value in (("run", run), ("status", status)) if value is not None]
        where = " WHERE " + " AND ".join(f"{name} = ?" for name, _ in chosen) if chosen else ""
        values = [value for _, value in chosen]
        total = self._count(f"SELECT count(*) FROM rollouts{where}", values)  # noqa: S608 - constants only
        query = f"SELECT {_SUMMARY} FROM rollouts{where} ORDER BY position DESC LIMIT ? OFFSET ?"  # noqa: S608
        rows = self._db.execute(query, [*values, limit, offset])
        return RolloutPage(total=total, rollouts=tuple(_summary(row) for row in rows))

    def _close_group(self, run: str, seq: int, counters: dict[str, int]) -> None:
        self._db.execute("DELETE FROM started WHERE run = ? AND seq = ?", (run, seq))
        self._save_counters(run, counters)

    def _save_counters(self, run: str, counters: dict[str, int]) -> None:
        self._db.execute("UPDATE runs SET counters = ? WHERE name = ?", (json.dumps(counters), run))

    def _count(self, query: str, values: Sequence[str] = ()) -> int:
        return int(self._db.execute(query, values).fetchone()[0])

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        try:
            self._db.execute("BEGIN IMMEDIATE")
            yield
            self._db.execute("COMMIT")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF not in _DISK:
                raise
            raise StoreUnavailable(f"{self._path}: cannot be written ({error}); free some space on its disk") from error
        finally:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")


def _row(r: Rollout) -> tuple[object, ...]:
    head = (r.id, r.run, r.group, r.task, r.environment, r.status, r.reward, r.success, r.version_min, r.version_max)
    return (*head, r.trainable_tokens, r.created_at, r.model_dump_json().encode())


def _summary(row: Sequence[object]) -> RolloutSummary:
    names = ("id", "run", "group", "task", "environment", "status", "reward", "success", "version_min", "version_max")
    values: dict[str, object] = dict(zip((*names, "tokens", "created_at"), row, strict=True))
    values["success"] = None if values["success"] is None else bool(values["success"])
    return RolloutSummary.model_validate(values)


def _locked(folder: Path) -> IO[str]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = (folder / "lock").open("w")
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be used ({error.strerror}); choose a writable --folder") from None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        handle.close()
        raise ConfigError(
            f"{folder}: another environment Space uses this folder; stop it or choose another --folder"
        ) from None
    return handle
