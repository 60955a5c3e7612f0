"""A rollout database read only: beside the Space that holds it, or in a folder that nobody serves any more."""

from __future__ import annotations

import sqlite3
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from sync.errors import ConfigError
from sync.schema.base import Identity
from sync.schema.rollouts import Rollout

from .store import SCHEMA_VERSION, RolloutStore

NEWEST = 20_000
"""Stored rollouts, the newest ones, that a series looks at."""
TIMED = 8
"""Rollouts of each window whose seconds per stage are read."""
_POINT = "position, run, status, reward, version_min, version_max, tokens, created_at"


class Archive(RolloutStore):
    """The database in `folder`, for reading; `close` it soon. Takes no lock, so that a Space may hold it meanwhile.

    Where no write-ahead log lies beside the file nobody writes it: it is then read as it is, and nothing is made in the
    folder. Raises ConfigError when there is no database of this schema version.
    """

    def __init__(self, folder: Path) -> None:
        self._path = path = folder / "rollouts.sqlite"
        if not path.is_file():
            raise ConfigError(f"{path} does not exist; name the --folder of an environment Space")
        mode = "mode=ro" if path.with_name(path.name + "-wal").exists() else "mode=ro&immutable=1"
        try:
            self._db = sqlite3.connect(f"{path.absolute().as_uri()}?{mode}", uri=True, check_same_thread=False)
            version = self._count("PRAGMA user_version")
        except sqlite3.Error as error:
            raise ConfigError(f"{path}: not a rollout database that can be read ({error})") from None
        if version != SCHEMA_VERSION:
            self._db.close()
            raise ConfigError(f"{path}: schema version {version}, this build reads {SCHEMA_VERSION}")

    def close(self) -> None:
        """Close the database."""
        self._db.close()

    def tasks(self) -> list[dict[str, Any]]:
        """Every task that has stored rollouts: how many, how many of them have a reward, its mean, and the share of
        successes among those whose success is known (None where none is)."""
        rows = self._db.execute(
            "SELECT environment, task, count(*), count(reward), avg(reward), avg(success) FROM rollouts "
            "GROUP BY environment, task ORDER BY environment, task"
        )
        names = ("environment", "task", "rollouts", "rewarded", "reward", "success")
        return [dict(zip(names, row, strict=True)) for row in rows]

    def group(self, name: str) -> list[str]:
        """The ids of a group's rollouts, in order."""
        rows = self._db.execute("SELECT id FROM rollouts WHERE grp = ? ORDER BY position", (name,))
        return [found for (found,) in rows]

    def series(self, run: str | None, windows: int) -> dict[str, Any]:
        """{run: [window, …]} of the newest NEWEST stored rollouts, in at most `windows` windows of equal counts each.

        A window is {rollouts, from, to (seconds since 1970), reward (mean of the known ones, or None), statuses,
        lag (mean of versions that a rollout's oldest token is behind the newest seen before in its run), tokens,
        seconds: {stage: mean of a sample}}.
        """
        where, values = ("WHERE run = ?", [run]) if run else ("", [])
        query = f"SELECT {_POINT} FROM rollouts {where} ORDER BY position DESC LIMIT {NEWEST}"  # noqa: S608 - constants
        of_run: dict[str, list[_Point]] = defaultdict(list)
        for row in self._db.execute(query, values):
            of_run[row[1]].append(_Point(*row))
        return {name: self._windows(points[::-1], windows) for name, points in sorted(of_run.items())}

    def _windows(self, points: Sequence[_Point], windows: int) -> list[dict[str, Any]]:
        size = -(-len(points) // windows)
        lags = _lags(points)
        return [
            {
                "rollouts": len(part),
                "from": min(p.created_at for p in part),
                "to": max(p.created_at for p in part),
                "reward": _mean(p.reward for p in part),
                "statuses": dict(Counter(p.status for p in part)),
                "lag": _mean(lags[at : at + size]),
                "tokens": sum(p.tokens for p in part),
                "seconds": self._seconds([p.position for p in part[:: max(1, len(part) // TIMED)]][:TIMED]),
            }
            for at in range(0, len(points), size)
            if (part := points[at : at + size])
        ]

    def _seconds(self, positions: Sequence[int]) -> dict[str, float]:
        found: dict[str, list[float]] = defaultdict(list)
        for position in positions:
            row = self._db.execute("SELECT body FROM rollouts WHERE position = ?", (position,)).fetchone()
            try:
                seconds = Rollout.model_validate_json(row[0]).seconds if row else {}
            except ValidationError:  # said where that rollout is opened; a mean does without it
                continue
            for stage, value in seconds.items():
                found[stage].append(value)
        return {stage: sum(values) / len(values) for stage, values in found.items()}


class _Point(NamedTuple):
    position: int
    run: str
    status: str
    reward: float | None
    version_min: str | None
    version_max: str | None
    tokens: int
    created_at: float


def _lags(points: Iterable[_Point]) -> list[int | None]:
    newest, lags = -1, list[int | None]()
    for point in points:
        if point.version_min is None or point.version_max is None:
            lags.append(None)
            continue
        newest = max(newest, Identity.parse(point.version_max).version)
        lags.append(newest - Identity.parse(point.version_min).version)
    return lags


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
