"""A store that stops, fails, lies or shows the past, at the call that a test names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Literal, TypeVar

from sync import MemoryStore
from sync.errors import StoreUnavailable
from sync.stores import Content, ObjectInfo, Store

T = TypeVar("T")
Fault = Literal["stop before", "stop after", "fail before", "fail after"]


class Stopped(BaseException):
    """The process ended here, as far as the test is concerned."""


class FaultStore:
    """Passes calls on to `inner`; every call is counted and may be hit by a fault.

    `at`: call number → fault. `rule`: (method, keys) → fault or None, asked for every call. `damage`: what a reader
    gets instead of the stored bytes. `stale`: a store whose listings and look-ups are shown instead.
    """

    def __init__(self, inner: Store, at: Mapping[int, Fault] | None = None) -> None:
        self.inner = inner
        self.url = inner.url
        self.lag = inner.lag
        self.at = dict(at or {})
        self.rule: Callable[[str, tuple[str, ...]], Fault | None] = lambda _method, _keys: None
        self.damage: Callable[[str, bytes], bytes] = lambda _key, data: data
        self.stale: Store | None = None
        self.calls: list[tuple[str, tuple[str, ...]]] = []

    def _run(self, method: str, keys: Iterable[str], work: Callable[[], T]) -> T:
        keys = tuple(keys)
        fault = self.at.get(len(self.calls)) or self.rule(method, keys)
        self.calls.append((method, keys))
        if fault == "stop before":
            raise Stopped
        if fault == "fail before":
            raise StoreUnavailable(f"{method} was refused by the test")
        result = work()
        if fault == "stop after":
            raise Stopped
        if fault == "fail after":
            raise StoreUnavailable(f"the reply of {method} was lost by the test")
        return result

    def put_batch(self, objects: Mapping[str, Content]) -> None:
        """See Store."""
        self._run("put_batch", objects, lambda: self.inner.put_batch(objects))

    def get(self, key: str, *, limit: int) -> bytes:
        """See Store."""
        return self._run("get", [key], lambda: self.damage(key, self.inner.get(key, limit=limit)))

    def fetch(self, key: str, path: Path, *, limit: int) -> None:
        """See Store."""

        def work() -> None:
            self.inner.fetch(key, path, limit=limit)
            path.write_bytes(self.damage(key, path.read_bytes()))

        self._run("fetch", [key], work)

    def list(self, prefix: str) -> list[ObjectInfo]:
        """See Store."""
        return self._run("list", [prefix], lambda: (self.stale or self.inner).list(prefix))

    def info(self, keys: Iterable[str]) -> dict[str, ObjectInfo]:
        """See Store."""
        wanted = tuple(keys)
        return self._run("info", wanted, lambda: (self.stale or self.inner).info(wanted))

    def delete(self, keys: Iterable[str]) -> None:
        """See Store."""
        wanted = tuple(keys)
        self._run("delete", wanted, lambda: self.inner.delete(wanted))


def flip(where: str, at: int = -1) -> Callable[[str, bytes], bytes]:
    """Damage for FaultStore: flips one bit of every object whose key contains `where`."""

    def damage(key: str, data: bytes) -> bytes:
        if where not in key or not data:
            return data
        changed = bytearray(data)
        changed[at % len(data)] ^= 0x10
        return bytes(changed)

    return damage


def cut(where: str) -> Callable[[str, bytes], bytes]:
    """Damage for FaultStore: every object whose key contains `where` ends one byte early."""
    return lambda key, data: data[:-1] if where in key else data


def copy_of(store: MemoryStore) -> MemoryStore:
    """Everything that a store holds now, etags included, in a store of its own. Read it only."""
    copy = MemoryStore()
    copy._objects = dict(store._objects)
    return copy
