"""A bucket that remembers its past, and one process's way to it, which refuses, loses, repeats, tears and lies.

`Bucket` is the truth: a MemoryStore on the world's time that keeps every content every key ever had. `View` is the
Store that one process holds: each call hands the baton on before and after it takes effect, and may meet a fault.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypeVar

from support.faults import Stopped

from sync.errors import CorruptObject, ObjectMissing, StoreUnavailable
from sync.layout import check_key
from sync.stores import MemoryStore, ObjectInfo
from sync.stores.base import Content

from .world import Process, World

T = TypeVar("T")
Entry = tuple[bytes, ObjectInfo]


class Bucket(MemoryStore):
    """`before_put` and `after_change` are asked for every object, in the moment it changes."""

    def __init__(self, world: World) -> None:
        super().__init__(now=lambda: world.now)
        self._world = world
        self._times: dict[str, list[float]] = {}
        self._past: dict[str, list[Entry | None]] = {}
        self.before_put: Callable[[str, bytes], None] = lambda _key, _data: None
        self.before_delete: Callable[[str], None] = lambda _key: None
        self.after_change: Callable[[str], None] = lambda _key: None

    def put_batch(self, objects: Mapping[str, Content]) -> None:
        """See Store; one object after the other."""
        for key, content in objects.items():
            data = content.read_bytes() if isinstance(content, Path) else bytes(content)
            self.before_put(key, data)
            super().put_batch({key: data})
            self._remember(key)

    def delete(self, keys: Iterable[str]) -> None:
        """See Store; one object after the other."""
        for key in keys:
            if key in self._objects:
                self.before_delete(key)
                super().delete([key])
                self._remember(key)

    def _remember(self, key: str) -> None:
        self._times.setdefault(key, []).append(self._world.now)
        self._past.setdefault(key, []).append(self._objects.get(key))
        self.after_change(key)

    def as_of(self, time: float, key: str) -> Entry | None:
        """What a key held at a moment."""
        at = bisect_right(self._times.get(key, []), time)
        return self._past[key][at - 1] if at else None

    def keys_as_of(self, time: Callable[[str], float], prefix: str) -> list[ObjectInfo]:
        """What a listing shows, each key as it was at a time of its own."""
        found = (self.as_of(time(key), key) for key in self._times if key.startswith(prefix))
        return sorted(entry[1] for entry in found if entry is not None)

    def peek(self, key: str) -> bytes | None:
        """The bytes under a key now, or None."""
        entry = self._objects.get(key)
        return None if entry is None else entry[0]

    def keys(self, prefix: str = "") -> list[str]:
        """The keys there are now."""
        return sorted(k for k in self._objects if k.startswith(prefix))


class Fault(NamedTuple):
    """kind: refused, lost, late, again, partial, serial, stale, slow, damaged, stop before, stop after, hold.

    `seconds`: how long behind a stale read is, how much later a late or repeated request lands, how long a slow one
    takes. `until`: what a held call waits for. `where`: which keys a stale read shows as they were (by default each at
    a time of its own within those seconds).
    """

    kind: str
    seconds: float = 0.0
    until: Callable[[], bool] | None = None
    where: Callable[[str], bool] | None = None


@dataclass
class Weather:
    """How often a call meets each fault (kind → probability), and the longest a listing lags and a request strays."""

    rates: dict[str, float] = field(default_factory=dict)
    lag: float = 5.0
    stray: float = 8.0


WRITES = ("refused", "lost", "late", "again", "partial", "serial", "slow")
LOOKS = ("refused", "stale", "slow")
READS = (*LOOKS, "damaged")
KINDS = tuple(dict.fromkeys((*WRITES, *READS)))


class View:
    """The Store of one process. `rule` names a fault for a call (method, keys); without one the weather draws it."""

    def __init__(self, bucket: Bucket, process: Process, weather: Weather) -> None:
        self.url, self.lag = bucket.url, weather.lag
        self._bucket, self._process, self._weather = bucket, process, weather
        self._world = process.world
        self._down_until = 0.0
        self.rule: Callable[[str, tuple[str, ...]], Fault | None] = lambda _method, _keys: None

    # --- the Store

    def put_batch(self, objects: Mapping[str, Content]) -> None:
        """See Store."""
        read = {check_key(k): c.read_bytes() if isinstance(c, Path) else bytes(c) for k, c in objects.items()}
        fault = self._before("put", tuple(read), WRITES)
        items = list(read.items())
        if fault.kind == "partial" and len(items) > 1:
            del items[self._world.rng.randrange(len(items))]
        if fault.kind in ("serial", "partial"):
            self._world.rng.shuffle(items)
            for item in items:
                self._bucket.put_batch(dict([item]))
                self._step(f"put {item[0]} alone")
        self._write(fault, "put", lambda: self._bucket.put_batch(read))

    def delete(self, keys: Iterable[str]) -> None:
        """See Store."""
        wanted = tuple(check_key(k) for k in keys)
        fault = self._before("delete", wanted, WRITES)
        if fault.kind in ("serial", "partial"):
            for key in wanted[: len(wanted) - (fault.kind == "partial")]:
                self._bucket.delete([key])
                self._step(f"delete {key} alone")
        self._write(fault, "delete", lambda: self._bucket.delete(wanted))

    def get(self, key: str, *, limit: int) -> bytes:
        """See Store."""
        fault = self._before("get", (check_key(key),), READS)
        entry = self._bucket.as_of(self._seen(fault, key), key)
        self._after("get", fault)
        if entry is None:
            raise ObjectMissing(f"{self.url} {key}: no such object")
        if len(entry[0]) > limit:
            raise CorruptObject(f"{key}: {len(entry[0])} bytes, expected at most {limit}")
        return self._damaged(entry[0]) if fault.kind == "damaged" else entry[0]

    def fetch(self, key: str, path: Path, *, limit: int) -> None:
        """See Store."""
        part = path.with_name(f".{path.name}.part")
        part.write_bytes(self.get(key, limit=limit))
        part.replace(path)

    def list(self, prefix: str) -> list[ObjectInfo]:
        """See Store."""
        fault = self._before("list", (prefix,), LOOKS)
        found = self._bucket.keys_as_of(lambda key: self._seen(fault, key), prefix)
        self._after("list", fault)
        return found

    def info(self, keys: Iterable[str]) -> dict[str, ObjectInfo]:
        """See Store."""
        wanted = tuple(check_key(k) for k in keys)
        fault = self._before("info", wanted, LOOKS)
        found = {k: entry[1] for k in wanted if (entry := self._bucket.as_of(self._seen(fault, k), k)) is not None}
        self._after("info", fault)
        return found

    # --- faults

    def _step(self, label: str, seconds: float = 0.0, until: Callable[[], bool] | None = None) -> None:
        self._world.pause(label, seconds, until)

    def _before(self, method: str, keys: tuple[str, ...], kinds: tuple[str, ...]) -> Fault:
        """Hand the baton on, then draw what this call meets; raises when it is refused."""
        world = self._world
        label = f"{method} {keys[0] if keys else ''}{f' +{len(keys) - 1}' if len(keys) > 1 else ''}"
        self._step(label, world.rng.choice((0.0, 0.0, 0.05, 0.4)) * self._process.pace)
        fault = self.rule(method, keys) or self._drawn(kinds)
        if fault.kind != "none":
            world.count[f"fault {fault.kind}"] += 1
            world.note(f"{method} meets: {fault.kind} {fault.seconds:.1f}")
        if fault.kind == "hold":
            self._step("held", fault.seconds, fault.until)
        elif fault.kind == "slow":
            self._step("slow", fault.seconds)
        elif fault.kind == "refused":
            raise StoreUnavailable(f"{method} was refused")
        elif fault.kind == "stop before":
            self._process.kill()
            raise Stopped
        return fault

    def _drawn(self, kinds: tuple[str, ...]) -> Fault:
        world, weather = self._world, self._weather
        if world.quiet:
            return Fault("none")
        if world.now < self._down_until:
            return Fault("refused")
        if world.rng.random() < weather.rates.get("down", 0.0):
            self._down_until = world.now + world.rng.uniform(2.0, 40.0)
            world.count["fault down"] += 1
        for kind in kinds:
            if world.rng.random() < weather.rates.get(kind, 0.0):
                longest = {"stale": weather.lag, "slow": 25.0}.get(kind, weather.stray)
                return Fault(kind, world.rng.uniform(0.0, longest))
        return Fault("none")

    def _seen(self, fault: Fault, key: str) -> float:
        """The time at which a read sees a key: now, or when it is stale some time within the fault's seconds ago."""
        if fault.kind != "stale":
            return self._world.now
        if fault.where is not None:
            return self._world.now - fault.seconds * fault.where(key)
        rng = self._world.rng
        return self._world.now - rng.choice((0.0, 1.0, rng.random())) * fault.seconds

    def _write(self, fault: Fault, method: str, effect: Callable[[], None]) -> None:
        if fault.kind == "late":
            self._world.later(fault.seconds, effect)
            self._step("no answer", min(fault.seconds, self._world.rng.uniform(0.0, 3.0)))
            raise StoreUnavailable(f"{method} timed out")
        if fault.kind == "partial":
            raise StoreUnavailable(f"{method}: one operation failed")
        if fault.kind != "serial":
            effect()
        if fault.kind == "again":
            self._world.later(fault.seconds, effect)
        self._after(method, fault)
        if fault.kind == "lost":
            raise StoreUnavailable(f"the reply of {method} was lost")

    def _after(self, method: str, fault: Fault) -> None:
        if fault.kind == "stop after":
            self._process.kill()
            raise Stopped
        self._step(f"{method} done", self._world.rng.choice((0.0, 0.0, 0.05)))

    def _damaged(self, data: bytes) -> bytes:
        if not data or self._world.rng.random() < 0.3:
            return data[:-1]
        changed = bytearray(data)
        changed[self._world.rng.randrange(len(data))] ^= 1 << self._world.rng.randrange(8)
        return bytes(changed)
