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

from . import layout
from .clock import REAL, Clock
from .codec import decode
from .digest import ZERO, element_sums, tensor_term
from .engine import EngineSink, TensorPatch
from .errors import (
    BaseMismatch,
    CorruptObject,
    DeltawireError,
    EngineFailed,
    InvalidPatch,
    Pruned,
    RejectError,
    ResyncError,
    StoreUnavailable,
)
from .events import Emit, emitter
from .fetch import check_manifest, download, read_manifest, read_object
from .heads import HeadWatcher
from .mirror import Mirror
from .plan import Held, plan
from .schema.base import Identity
from .schema.calls import SyncStatus
from .schema.wire import Head, Manifest, Ref
from .stores.base import Store
from .tensors import bits, state_bytes
from .term import read_catchup

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

    Raises ConfigError at construction when the mirror folder is owned by another process or cannot be written.
    """

    def __init__(
        self, store: Store, folder: Path, engine: EngineSink | None, *, channel: str = "weights",
        emit: Emit | None = None, clock: Clock = REAL, audit_every: int = 64,
    ) -> None:  # fmt: skip
        self._store, self._engine, self._channel, self._clock = store, engine, channel, clock
        self._emit = emit or emitter("follower", "none")
        self._audit_every = audit_every
        self._heads = HeadWatcher(store, channel)
        self._poked = threading.Event()
        self._engine_at: Identity | None = None
        self._pending: list[dict[str, TensorPatch]] = []
        self._since_audit = 0
        self._lock = threading.Lock()
        self._facts: dict[str, Any] = {"ready": False, "reason": "no version was applied yet"}
        self._mirror = Mirror(folder)
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
        if self._engine is None:
            self._pending = []
            if self._presentable():
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
        """Flush the mirror and release its folder."""
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
        target = head.identity
        assert target is not None
        if self._mirror.uid not in (None, head.channel_uid):
            self._emit("channel_replaced", was=self._mirror.uid, now=head.channel_uid)
            self._mirror.forget_channel()
            self._forget_engine("the bucket holds another channel now")
        held = self._mirror.held
        lag = None if held is None else target.version - held.identity.version
        self._note(head=str(target), channel_uid=head.channel_uid, lag=lag)
        if held is not None and target <= held.identity:
            return  # I3: what we reported never goes back; an older or equal head changes nothing
        highest = self._mirror.highest
        if highest is not None and target < highest:
            if held is None:
                self._note(ready=False, reason=f"the bucket shows {target}, but {highest} was reported before: waiting")
            return
        refs = (*(() if _next_to(head, held) else read_catchup(self._store, head)), *head.recent)
        avoid: set[str] = set()
        while True:
            try:
                for ref in plan(refs, target, self._mirror.held, avoid):
                    self._step(ref, head)
            except (RejectError, ResyncError, StoreUnavailable) as error:
                bad = getattr(error, "ref_key", None)
                if bad is None or not self._other_way(refs, target, {*avoid, bad}):
                    raise
                avoid.add(bad)
                self._emit("detour", around=bad, why=str(error))
                continue
            break
        self._note(lag=0, last_error="")

    def _other_way(self, refs: tuple[Ref, ...], target: Identity, avoid: set[str]) -> bool:
        try:
            plan(refs, target, self._mirror.held, avoid)
        except Pruned:
            return False
        return True

    def _step(self, ref: Ref, head: Head) -> None:
        try:
            manifest = self._manifest(ref, head)
            if ref.kind == "anchor":
                self._install(ref, manifest)
            else:
                self._apply(ref, manifest)
        except (RejectError, ResyncError, StoreUnavailable) as error:
            self._count(refused_objects=1)
            error.ref_key = ref.key  # type: ignore[union-attr]
            raise

    def _manifest(self, ref: Ref, head: Head) -> Manifest:
        if head.manifest is not None and head.manifest.sha256() == ref.sha256:
            check_manifest(head.manifest, ref)
            return head.manifest
        manifest = read_manifest(self._store, ref)
        if manifest.channel_uid != head.channel_uid:
            raise CorruptObject(f"{ref.key}: belongs to channel {manifest.channel_uid}, not {head.channel_uid}")
        return manifest

    def _install(self, ref: Ref, manifest: Manifest) -> None:
        before = self._mirror.held
        try:
            self._mirror.install(
                manifest.channel_uid, manifest.identity, manifest.state_digest,
                lambda folder: download(self._store, ref, manifest, folder),
            )  # fmt: skip
        finally:  # the mirror may have moved although its disk failed behind
            if self._mirror.held != before:
                self._forget_engine("a new anchor must be loaded", keep_serving=True)
            self._note(**self._held_facts())
        self._count(digest_checks=1, anchors_loaded=1, bytes_fetched=manifest.payload_bytes)
        self._emit("anchor", version=manifest.identity, bytes=manifest.payload_bytes)

    def _apply(self, ref: Ref, manifest: Manifest) -> None:
        if manifest.base_digest != self._mirror.sums.text():
            raise BaseMismatch(
                f"{ref.key}: made for base {manifest.base_digest}, the mirror holds {self._mirror.sums.text()}"
            )
        patches: dict[str, TensorPatch] = {}
        sums = self._mirror.sums
        for entry in manifest.objects:
            if entry.size > 2 * state_bytes(self._mirror.schema) + (1 << 20):
                raise CorruptObject(f"{ref.key}: a delta of {entry.size} bytes for a smaller state")
            payload = read_object(self._store, ref, manifest, entry.name)
            try:
                decoded = decode(payload, self._mirror.schema, self._mirror.state)
            except (InvalidPatch, BaseMismatch) as error:
                raise type(error)(f"{layout.folder_of(ref.key)}{entry.name}: {error}") from None
            patches |= decoded.patches
            sums = sums.minus(decoded.removed).plus(decoded.added)
        self._count(digest_checks=1)
        if sums.text() != manifest.state_digest:
            self._count(digest_failures=1)
            raise CorruptObject(f"{ref.key}: applying it gives {sums.text()}, declared {manifest.state_digest}")
        try:
            self._mirror.apply(patches, manifest.identity, sums)
        finally:  # the mirror may have moved although its disk failed behind
            if self._mirror.identity == manifest.identity:
                self._pending.append(patches)
            self._note(**self._held_facts())
        self._count(versions_applied=1, bytes_fetched=manifest.payload_bytes)
        self._emit("delta", version=manifest.identity, bytes=manifest.payload_bytes)

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
                engine.pause()
                started = self._clock.monotonic()
                engine.apply(union, target)
                self._read_back(union)
            else:
                self._mirror.flush()
                engine.load(self._mirror.checkpoint, target)
                self._audit_engine()
            self._since_audit += len(self._pending)
            if known and self._since_audit >= self._audit_every:
                self._audit_engine()
            engine.resume()
        except BaseException as error:
            reason = f"the engine failed to reach {target}, reloading: {error}"
            self._note(ready=False, reason=reason)
            self._pending = []
            if isinstance(error, DeltawireError) or not isinstance(error, Exception):
                raise
            raise EngineFailed(reason) from error
        self._engine_at, self._pending = target, []
        self._note(ready=True, reason="", version=str(target), pause_seconds_last=self._clock.monotonic() - started)
        return True

    def _presentable(self) -> bool:
        """I3: False while the mirror holds nothing, or less than was ever reported (on the way out of a fork)."""
        held, highest = self._mirror.identity, self._mirror.highest
        return held is not None and (highest is None or held >= highest)

    def _union(self) -> dict[str, TensorPatch]:
        """Everything that changed since the engine's version, with the mirror's present values."""
        union: dict[str, TensorPatch] = {}
        for name in {n for patches in self._pending for n in patches}:
            parts = [patches[name][0] for patches in self._pending if name in patches]
            sparse = [p for p in parts if p is not None]
            flat = bits(self._mirror.state[name])
            if len(sparse) < len(parts) or sum(map(len, sparse)) * WHOLE_SHARE > len(flat):
                union[name] = (None, flat.copy())
            else:
                index: NDArray[np.integer[Any]] = np.unique(np.concatenate(sparse))
                union[name] = (index, flat[index])
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
        self._engine_at, self._pending = None, []
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


def _next_to(head: Head, held: Held | None) -> bool:
    """True when head.recent alone leads from what is held to the head."""
    return held is not None and any(
        r.kind == "delta" and (r.version, r.base_digest) == (held.identity.version + 1, held.digest)
        for r in head.recent
    )
