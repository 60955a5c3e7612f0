"""A store in memory, for tests and simulations of one process."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from ..errors import CorruptObject, ObjectMissing
from ..layout import check_key
from .base import Content, ObjectInfo


class MemoryStore:
    """Objects in a dict; the reference for every other store."""

    def __init__(self, *, now: Callable[[], float] = time.time) -> None:
        self.url = "memory:"
        self.lag = 0.0
        self._now = now
        self._lock = threading.Lock()
        self._objects: dict[str, tuple[bytes, ObjectInfo]] = {}
        self._etags = itertools.count()

    def put_batch(self, objects: Mapping[str, Content]) -> None:
        """See Store."""
        for key in objects:
            check_key(key)
        read = {k: c.read_bytes() if isinstance(c, Path) else bytes(c) for k, c in objects.items()}
        with self._lock:
            for key, data in read.items():
                info = ObjectInfo(key, len(data), self._now(), str(next(self._etags)))
                self._objects[key] = (data, info)

    def get(self, key: str, *, limit: int) -> bytes:
        """See Store."""
        check_key(key)
        with self._lock:
            found = self._objects.get(key)
        if found is None:
            raise ObjectMissing(f"{self.url} {key}: no such object")
        if len(found[0]) > limit:
            raise CorruptObject(f"{key}: {len(found[0])} bytes, expected at most {limit}")
        return found[0]

    def fetch(self, key: str, path: Path, *, limit: int) -> None:
        """See Store."""
        part = path.with_name(f".{path.name}.part")
        part.write_bytes(self.get(key, limit=limit))
        part.replace(path)

    def list(self, prefix: str) -> list[ObjectInfo]:
        """See Store."""
        with self._lock:
            return sorted(info for key, (_, info) in self._objects.items() if key.startswith(prefix))

    def info(self, keys: Iterable[str]) -> dict[str, ObjectInfo]:
        """See Store."""
        with self._lock:
            return {key: self._objects[key][1] for key in keys if check_key(key) in self._objects}

    def delete(self, keys: Iterable[str]) -> None:
        """See Store."""
        with self._lock:
            for key in keys:
                self._objects.pop(check_key(key), None)
