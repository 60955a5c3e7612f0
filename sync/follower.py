"""Follow a channel: poll the head, fetch and verify, patch the mirror, then the engine. Bad data never reaches it.

The order of one update: listing of heads → head → plan → objects (hash checked) → decode against the mirror (digest
checked) → redo log → mirror → pause the engine → scatter everything since its version → read back → resume. So the
mirror is never behind the engine, and a failed apply is mended from the mirror without the bucket.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .clock import REAL, Clock
from .digest import ZERO, element_sums, tensor_term
from .engine import EngineSink, TensorPatch
from .errors import ConfigError, DeltawireError, EngineFailed, Pruned, StoreUnavailable
from .events import Emit, emitter
from .heads import HeadWatcher, read_catchup
from .mirror import Mirror, Patches
from .pins import ReaderPin
from .replica import Replica
from .schema.base import Identity
from .schema.calls import SyncStatus
from .schema.wire import Head
from .stores.base import Store
from .tensors import bits

NOWHERE: NDArray[np.integer[Any]] = np.empty(0, np.int32)
WHOLE_SHARE = 8
"""Where more than 1/8 of a tensor changed, the engine reads it whole from the mirror."""


@contextmanager
def _disk_errors() -> Iterator[None]:
    """A disk that is full or fails may recover: the caller tries again, it does not end."""
    try:
        yield
    except OSError as error:
        raise StoreUnavailable(
            f"the disk of the mirror failed ({error.strerror or error}) at {error.filename or 'a write'}; free some"
        ) from error


class Follower:
    """Follows one channel into a mirror folder and, if given, an engine. `poll` and `run` belong to one thread;
    `poke` and `status` may be called from any.

    pin_ttl: seconds that this reader's pin lives unless renewed; None follows without one. reader: its name in the pin.
    audit_every: versions between two recomputations of the digest from the engine's own parameters.
    at: a live version, as 12 or 12@2, to go to and to stay at; None follows the head.
    Raises ConfigError at construction when the mirror folder is owned by another process or cannot be written.
    """

    def __init__(
        self, store: Store, folder: Path, engine: EngineSink | None, *, channel: str = "weights",
        emit: Emit | None = None, clock: Clock = REAL, audit_every: int = 64,
        pin_ttl: float | None = None, reader: str = "", at: str | None = None,
    ) -> None:  # fmt: skip
        self._store, self._engine, self._channel, self._clock = store, engine, channel, clock
        self._emit = emit or emitter("follower", "none")
        self._audit_every, self._at = audit_every, at
        self._heads = HeadWatcher(store, channel, clock=clock)
        self._poked = threading.Event()
        self._engine_at: Identity | None = None
        self._dirty: dict[str, NDArray[np.integer[Any]] | None] = {}
        self._since_audit = 0
        self._lock = threading.Lock()
        self._facts: dict[str, Any] = {"ready": False, "reason": "no version was applied yet"}
        self._pin = ReaderPin(store, channel, pin_ttl, reader, clock, self._emit)
        self._mirror = Mirror(folder)
        self._replica = Replica(store, self._mirror, self._emit, count=self._count, on_move=self._moved)
        if self._mirror.recovered:
            self._count(digest_checks=1)
            self._emit("recovered", version=self._mirror.identity)
        self._note(**self._held_facts())

    def poll(self) -> bool:
        """Look at the head once and go there. True when the engine (without one: the mirror) moved.

        Raises what went wrong, after noting it in the status; the engine keeps serving what it had unless the apply
        itself failed, in which case it stays paused and the next poll reloads it from the mirror, whether or not the
        bucket answers.
        """
        self._count(polls=1)
        before = self._mirror.identity
        try:
            with _disk_errors():
                self._look()
                moved = self._move_engine() if self._engine is not None else self._mirror.identity != before
        except DeltawireError as error:
            self._note(last_error=str(error))
            self._emit("refused", error=type(error).__name__, why=str(error))
            raise
        if self._engine is None and self._presentable():
            self._note(ready=True, reason="")
        return moved

    def run(self, stop: threading.Event, interval: float) -> None:
        """Poll until `stop`, every `interval` seconds and at once on a poke. Deltawire errors are noted and retried."""
        try:
            while not stop.is_set():
                self._poked.clear()
                try:
                    self.poll()
                except DeltawireError:
                    self._poked.clear()  # noted by poll; wait the interval before the next try
                self._wait(stop, interval)
        except BaseException as error:
            self._note(ready=False, reason=f"the follower stopped: {type(error).__name__}: {error}")
            raise

    def poke(self) -> None:
        """Hint that the head moved: poll now."""
        self._poked.set()

    def status(self) -> SyncStatus:
        """What is held, checked and wrong at the moment."""
        with self._lock:
            return SyncStatus(**self._facts)

    def close(self) -> None:
        """Release the pin, flush the mirror and release its folder."""
        self._pin.release()
        with _disk_errors():
            self._mirror.close()

    def _wait(self, stop: threading.Event, interval: float) -> None:
        until = self._clock.monotonic() + interval
        while not stop.is_set() and (left := until - self._clock.monotonic()) > 0:
            if self._poked.wait(min(left, 0.2)):
                return

    # --- bucket → mirror

    def _look(self) -> None:
        try:
            head = self._heads.look().get(self._channel)
            if head is not None and head.identity is not None:
                self._follow(head)
        except DeltawireError:
            if self._engine_at is None:
                self._move_engine()  # to mend or start the engine from the mirror needs no bucket
            raise

    def _follow(self, head: Head) -> None:
        if head.channel_uid in self._mirror.left:
            self._note(
                last_error=f"the bucket shows channel {head.channel_uid}, which was left for {self._mirror.uid}: a "
                "stale look, or an old run was put back; for the latter empty the mirror's folder"
            )
            return
        if self._mirror.uid not in (None, head.channel_uid):
            self._emit("channel_replaced", was=self._mirror.uid, now=head.channel_uid)
            self._mirror.leave_channel()
            self._forget_engine("the bucket holds another channel now")
        head = self._pinned(head)
        target, held = self._target(head), self._mirror.held
        lag = None if held is None else target.version - held.identity.version
        self._note(head=str(head.identity), channel_uid=head.channel_uid, lag=lag)
        if held is not None and target <= held.identity:
            if target == held.identity:
                self._note(last_error="")
            return  # I3: what we reported never goes back; an older or equal head changes nothing
        highest = self._mirror.highest
        if highest is not None and target < highest:
            if held is None:
                self._note(ready=False, reason=f"the bucket shows {target}, but {highest} was reported before: waiting")
            return
        self._replica.go_to(target, head)
        self._note(lag=0, last_error="")

    def _target(self, head: Head) -> Identity:
        """The head's version, or the one to stay at. Raises Pruned when that is not live, ConfigError when the mirror
        is past it."""
        assert head.identity is not None
        if self._at is None:
            return head.identity
        held = self._mirror.identity
        live = [ref.identity for ref in (*read_catchup(self._store, head), *head.recent)] if held is None else [held]
        found = [identity for identity in live if self._at in (str(identity), str(identity.version))]
        if found:
            return max(found)
        if held is not None:
            text = f"the mirror in {self._mirror.folder} holds {held}, not {self._at}; choose an empty folder"
            raise ConfigError(text)
        raise Pruned(f"version {self._at} is not live; live are {min(live)} to {max(live)}, see `deltawire log`")

    def _pinned(self, head: Head) -> Head:
        """Write the pin when it is due, and then look again: a floor above the pin came first."""
        held = self._mirror.identity
        if self._pin.due(head, held) and self._pin.write(head, held):
            again = self._heads.look().get(self._channel, head)
            return again if again.channel_uid == head.channel_uid and again.identity is not None else head
        return head

    def _moved(self, patches: Patches | None) -> None:
        if patches is None:
            self._forget_engine("a new anchor must be loaded", keep_serving=True)
        else:
            self._since_audit += 1
            for name, (index, _) in patches.items():
                self._touch(name, index)
        self._note(**self._held_facts())

    def _touch(self, name: str, index: NDArray[np.integer[Any]] | None) -> None:
        """Note where the mirror is ahead of the engine: places (None: the whole tensor), never values."""
        if self._engine is None:
            return
        before = self._dirty.get(name, NOWHERE)
        size = self._mirror.schema[name].size
        if index is None or before is None or len(before) + len(index) > size // WHOLE_SHARE:
            self._dirty[name] = None
        else:
            self._dirty[name] = np.union1d(before, index) if len(before) else np.array(index)

    # --- mirror → engine

    def _move_engine(self) -> bool:
        target, engine = self._mirror.identity, self._engine
        if engine is None or target is None or target == self._engine_at or not self._presentable():
            return False
        known = self._engine_at is not None
        self._engine_at, started = None, self._clock.monotonic()
        try:
            if known:
                union = self._union()
                self._note(paused=True)
                engine.pause()
                started = self._clock.monotonic()
                engine.apply(union, target)
                self._read_back(union)
            else:
                self._mirror.flush()
                engine.load(self._mirror.checkpoint, target)
                self._audit_engine()
            if known and self._since_audit >= self._audit_every:
                self._audit_engine()
            engine.resume()
        except BaseException as error:
            reason = f"the engine failed to reach {target}, reloading: {error}"
            self._note(ready=False, reason=reason, paused=True)
            self._dirty = {}
            if isinstance(error, DeltawireError) or not isinstance(error, Exception):
                raise
            raise EngineFailed(reason) from error
        self._engine_at, self._dirty = target, {}
        self._note(
            ready=True,
            reason="",
            paused=False,
            version=str(target),
            pause_seconds_last=self._clock.monotonic() - started,
        )
        return True

    def _presentable(self) -> bool:
        """I3: False while the mirror holds nothing, or less than was ever reported (on the way out of a fork)."""
        held, highest = self._mirror.identity, self._mirror.highest
        return held is not None and (highest is None or held >= highest)

    def _union(self) -> dict[str, TensorPatch]:
        """Everything that changed since the engine's version, with the mirror's present values (views where whole)."""
        union: dict[str, TensorPatch] = {}
        for name, index in self._dirty.items():
            flat = bits(self._mirror.state[name])
            union[name] = (None, flat) if index is None else (index, flat[index])
        return union

    def _read_back(self, union: Mapping[str, TensorPatch]) -> None:
        assert self._engine is not None
        for name, (index, values) in union.items():
            if not np.array_equal(self._engine.read(name, index), values):
                raise EngineFailed(f"engine holds other bits than were written to {name!r}")

    def _audit_engine(self) -> None:
        """Recompute the state digest from the engine's own parameters."""
        assert self._engine is not None
        total = ZERO
        for name, spec in self._mirror.schema.items():
            held = self._engine.read(name, None)
            total = total.plus(tensor_term(name, spec)).plus(element_sums(name, None, held))
        self._since_audit = 0
        self._count(digest_checks=1)
        if total != self._mirror.sums:
            self._count(digest_failures=1)
            raise EngineFailed(f"the engine's parameters give {total.text()}, the mirror {self._mirror.sums.text()}")

    def _forget_engine(self, reason: str, *, keep_serving: bool = False) -> None:
        self._engine_at, self._dirty = None, {}
        if not keep_serving:
            self._note(ready=False, reason=reason, version=None)

    # --- status

    def _held_facts(self) -> dict[str, Any]:
        held, highest = self._mirror.held, self._mirror.highest
        return {
            "mirror": str(held.identity) if held else None,
            "state_digest": held.digest if held else None,
            "highest_reported": str(highest) if highest else None,
            "channel_uid": self._mirror.uid,
        }

    def _note(self, **facts: Any) -> None:
        with self._lock:
            self._facts |= facts

    def _count(self, **more: int) -> None:
        with self._lock:
            for key, n in more.items():
                self._facts[key] = self._facts.get(key, 0) + n
