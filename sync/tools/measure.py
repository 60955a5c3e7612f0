"""Measurements on a store: how stale its answers are, whether batches are atomic, its clock, its speed."""

from __future__ import annotations

import secrets
import statistics
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from ..clock import Clock
from ..errors import ObjectMissing
from ..stores.base import Store
from . import common

BIG = 8_000_000
AGREE = 3
"""Fresh answers in a row after which a write counts as seen: a stale one may come between."""
_PAUSE = 0.05
_SMALL = 256


class Measure:
    """Writes below `folder` alone; `clean` deletes all of it. Times are seconds of `clock.monotonic`.

    patience: seconds after which a write counts as not seen.
    """

    def __init__(self, store: Store, clock: Clock, patience: float) -> None:
        self._store, self._clock, self._patience = store, clock, patience
        self.folder = f"doctor/{clock.token_hex(8)}/"
        self._written: set[str] = set()
        self._made = 0

    def put(self, name: str, data: bytes) -> str:
        """Write one object; returns its key."""
        key = self.folder + name
        self._written.add(key)
        self._store.put_batch({key: data})
        return key

    def clean(self) -> None:
        """Delete what was written."""
        self._store.delete(sorted(self._written))

    def _new(self) -> str:
        self._made += 1
        return f"probe-{self._made:04d}"

    # --- how fast

    def round_trip(self, rounds: int) -> dict[str, float]:
        """Median seconds of one small call of each kind."""
        key = self.put(self._new(), secrets.token_bytes(_SMALL))
        calls: dict[str, Callable[[], object]] = {
            "list": lambda: self._store.list(self.folder),
            "info": lambda: self._store.info([key]),
            "get": lambda: self._get(key),
            "put": lambda: self.put("round-trip", secrets.token_bytes(_SMALL)),
        }
        return {
            name: round(statistics.median(self._timed(call) for _ in range(rounds)), 6) for name, call in calls.items()
        }

    def throughput(self) -> dict[str, float]:
        """Bytes per second of 8 MB that nothing compresses."""
        data = secrets.token_bytes(BIG)
        up = self._timed(lambda: self.put("big", data))
        down = self._timed(lambda: self._until(lambda: self._get(self.folder + "big", BIG) == data, agree=1))
        return {"up": BIG / max(up, 1e-6), "down": BIG / max(down, 1e-6)}

    def clock_offset(self) -> dict[str, float]:
        """The store's clock minus this machine's, from the quickest of a few writes."""
        found = []
        for _ in range(AGREE):
            before = self._clock.now()
            key = self.put(self._new(), b"clock")
            after = self._clock.now()
            self._until(lambda key=key: key in self._store.info([key]), agree=1)  # type: ignore[misc]
            seen = self._store.info([key]).get(key)
            if seen is not None:
                found.append(((after - before) / 2, seen.uploaded_at - (before + after) / 2))
        error, offset = min(found, default=(float("inf"), 0.0))
        return {"seconds": round(offset, 6), "error": round(error, 6)}

    # --- how stale

    def staleness(self, rounds: int) -> dict[str, common.Result]:
        """Every way in which an answer may come from before a write, each measured `rounds` times."""
        ways: dict[str, Callable[[], tuple[float, bool]]] = {
            "put_to_list": self._put_to_list, "put_to_info": self._put_to_info,
            "overwrite_to_read": self._overwrite_to_read, "overwrite_to_list": self._overwrite_to_list,
            "delete_to_list": self._delete_to_list,
        }  # fmt: skip
        return {name: _summary([way() for _ in range(rounds)]) for name, way in ways.items()}

    def _put_to_list(self) -> tuple[float, bool]:
        key = self.put(self._new(), secrets.token_bytes(_SMALL))
        return self._until(lambda: self._listed(key) is not None)

    def _put_to_info(self) -> tuple[float, bool]:
        key = self.put(self._new(), secrets.token_bytes(_SMALL))
        return self._until(lambda: key in self._store.info([key]))

    def _overwrite_to_read(self) -> tuple[float, bool]:
        key = self._settled()
        data = secrets.token_bytes(_SMALL)
        self.put(key.removeprefix(self.folder), data)
        return self._until(lambda: self._get(key) == data)

    def _overwrite_to_list(self) -> tuple[float, bool]:
        key = self._settled()
        before = self._listed(key)
        self.put(key.removeprefix(self.folder), secrets.token_bytes(_SMALL))
        return self._until(lambda: self._listed(key) not in (None, before))

    def _delete_to_list(self) -> tuple[float, bool]:
        key = self._settled()
        self._store.delete([key])
        return self._until(lambda: self._listed(key) is None)

    def _settled(self) -> str:
        """An object whose first content every look shows."""
        data = secrets.token_bytes(_SMALL)
        key = self.put(self._new(), data)
        self._until(lambda: self._listed(key) is not None and self._get(key) == data)
        return key

    def _until(self, fresh: Callable[[], bool], *, agree: int = AGREE) -> tuple[float, bool]:
        """(seconds until the last stale answer, 0 when there was none; whether the write was seen at all)."""
        started = self._clock.monotonic()
        last, row = 0.0, 0
        while row < agree:
            asked = self._clock.monotonic() - started
            if fresh():
                row += 1
                continue
            row, last = 0, max(self._clock.monotonic() - started, 1e-6)
            if asked >= self._patience:
                return last, False
            self._clock.sleep(_PAUSE)
        return last, True

    # --- batches

    def batches(self, rounds: int, size: int) -> common.Result:
        """Watch the listing while batches are written; a look that sees a part of one is `partial`."""
        looks = partial = 0
        with ThreadPoolExecutor(1) as pool:
            for number in range(rounds):
                prefix = f"{self.folder}batch-{number:04d}-"
                objects = {f"{prefix}{n:04d}": secrets.token_bytes(_SMALL) for n in range(size)}
                self._written |= objects.keys()
                writing = pool.submit(self._store.put_batch, objects)
                while True:
                    over = writing.done()
                    seen = len(self._store.list(prefix))
                    looks += 1
                    partial += 0 < seen < size
                    if over:
                        break
                    self._clock.sleep(0)
                writing.result()
        return {"size": size, "looks": looks, "partial": partial}

    # --- helpers

    def _get(self, key: str, limit: int = _SMALL) -> bytes | None:
        try:
            return self._store.get(key, limit=limit)
        except ObjectMissing:
            return None

    def _listed(self, key: str) -> tuple[str, float] | None:
        """What the listing says of an object, None when it lacks it."""
        found = {i.key: i for i in self._store.list(self.folder)}.get(key)
        return None if found is None else (found.etag, found.uploaded_at)

    def _timed(self, work: Callable[[], object]) -> float:
        started = self._clock.monotonic()
        work()
        return self._clock.monotonic() - started


def _summary(found: list[tuple[float, bool]]) -> common.Result:
    times = [seconds for seconds, _ in found]
    return {
        "rounds": len(found), "stale": sum(t > 0 for t in times), "worst": round(max(times), 6),
        "median": round(statistics.median(times), 6), "unseen": sum(not seen for _, seen in found),
    }  # fmt: skip
