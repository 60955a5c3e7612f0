"""Breaks one promise each, on purpose: a simulation that does not notice them proves nothing.

Every mutant is a context manager that patches the library at one seam. `SETUPS` gives the habits under which a mutant
shows quickly; `caught` plays seeds until the judge objects.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import numpy as np

import sync.collect
import sync.compact
import sync.fetch
import sync.follower
import sync.replica
from sync import Identity
from sync.base import Base
from sync.codec import TensorPatch, compose, decode
from sync.collect import Collector, wanted_floor
from sync.compact import Compactor
from sync.digest import Sums
from sync.errors import CorruptObject, DeltawireError, ObjectMissing, StoreUnavailable
from sync.follower import Follower
from sync.heads import newest, read_catchup, read_head
from sync.layout import HEADS
from sync.plan import plan
from sync.replica import Replica
from sync.schema.wire import Ref
from sync.tensors import bits
from sync.term import Term, TermOptions

from .play import Play
from .promises import start
from .schedules import play_named
from .setups import Setup, calm, damaged, drawn, lossy, rivals, spans, stale
from .world import Broken

Mutant = Callable[[], AbstractContextManager[Any]]


@contextmanager
def head_before_objects() -> Iterator[None]:
    """The head is written first, the objects it names after it."""
    plain, waiting = Term._put, dict[int, tuple[Any, str]]()

    def put(self: Term, objects: Any, what: str) -> None:
        if what.startswith("version "):
            waiting[id(self)] = (objects, what)
            return
        plain(self, objects, what)
        if id(self) in waiting:
            plain(self, *waiting.pop(id(self)))

    with patch.object(Term, "_put", put):
        yield


@contextmanager
def base_before_commit() -> Iterator[None]:
    """The base moves when a difference is staged, not when it was committed."""
    plain = Base.encode

    def encode(self: Base, change: Any, codec: str) -> Any:
        result = plain(self, change, codec)
        for name, one in change.items():
            bits(self.state[name])[one.index] = one.new
        return result

    with patch.object(Base, "encode", encode):
        yield


def no_fence() -> AbstractContextManager[Any]:
    """Nobody looks for rivals."""
    return patch.object(Term, "check_fence", lambda _self: None)


@contextmanager
def no_settling() -> Iterator[None]:
    """A claim looks for rivals at once, not after the time that a listing may lag."""
    plain = TermOptions.__post_init__

    def settle(self: TermOptions) -> None:
        plain(self)
        object.__setattr__(self, "settle", 0.0)

    with patch.object(TermOptions, "__post_init__", settle):
        yield


def pins_ignored() -> AbstractContextManager[Any]:
    """Collecting does not read the pins."""
    return patch.object(sync.collect, "read_pins", lambda *_: ([], []))


def grace_ignored() -> AbstractContextManager[Any]:
    """A plan is swept as soon as it is written."""
    return patch.object(Collector, "ready", property(lambda self: self.due_at is not None))


@contextmanager
def floor_not_raised() -> Iterator[None]:
    """What lies below the wanted floor is deleted although the head still names it."""
    plain = sync.collect.sweepable

    def sweepable(listing: Any, head: Any, refs: Any, pins: Any, now: float, busy: Any = ()) -> list[str]:
        refs = tuple(refs)
        floor = wanted_floor(refs, 1, pins, now) or 0
        return plain(listing, head, [r for r in refs if start(r) >= floor], pins, now, busy)

    with (
        patch.object(sync.collect, "sweepable", sweepable),
        patch.object(sync.collect, "wanted_floor", lambda *_: None),
    ):
        yield


@contextmanager
def digests_ignored() -> Iterator[None]:
    """A follower goes by version numbers alone: no base digest, no state digest."""

    def by_number(refs: Any, target: Identity, held: Any, avoid: Any = ()) -> tuple[Ref, ...]:
        if held is not None and held.identity.version < target.version:
            steps = {r.version: r for r in refs if r.kind == "delta" and r.key not in avoid}
            way = [steps.get(n) for n in range(held.identity.version + 1, target.version + 1)]
            if None not in way:
                return tuple(r for r in way if r is not None)
        return plan(refs, target, held, avoid)

    def apply(self: Replica, ref: Ref, manifest: Any) -> None:
        mirror, patches = self.mirror, dict[str, Any]()
        for entry in manifest.objects:
            payload = sync.fetch.read_object(self.store, ref, manifest, entry.name)
            patches |= decode(payload, mirror.schema, None).patches
        mirror.apply(patches, manifest.identity, np.zeros_like(mirror._pieces))
        mirror.audit()  # what it holds, so that the rolling audit does not see it in this mutant's stead
        mirror.sums = Sums.parse(manifest.state_digest)
        self._on_move(patches)

    with patch.object(sync.replica, "plan", by_number), patch.object(Replica, "_apply", apply):
        yield


@contextmanager
def hashes_ignored() -> Iterator[None]:
    """Objects are used without a look at their sha256."""

    def checked_bytes(store: Any, key: str, size: int, sha256: str) -> bytes:
        try:
            return bytes(store.get(key, limit=size))
        except ObjectMissing:
            raise CorruptObject(f"{key} is missing") from None

    def checked_file(store: Any, key: str, size: int, sha256: str, path: Path) -> None:
        try:
            store.fetch(key, path, limit=size)
        except ObjectMissing:
            raise CorruptObject(f"{key} is missing") from None

    with (
        patch.object(sync.fetch, "checked_bytes", checked_bytes),
        patch.object(sync.fetch, "_checked_file", checked_file),
    ):
        yield


@contextmanager
def engine_patched_in_doubt() -> Iterator[None]:
    """After an update that broke off the engine is patched on from where it was, not reloaded."""
    plain = Follower._move_engine

    def move(self: Follower) -> bool:
        before = self._engine_at
        try:
            return plain(self)
        except Exception:
            self._engine_at = before
            raise

    with patch.object(Follower, "_move_engine", move):
        yield


@contextmanager
def older_heads_followed() -> Iterator[None]:
    """A follower goes wherever the bucket's present head is, back too."""
    plain = Follower._follow

    def follow(self: Follower, head: Any) -> None:
        held = self._mirror.identity
        if held is not None and head.identity < held:
            self._mirror.forget_channel()
            self._forget_engine("going back", keep_serving=True)
        plain(self, head)

    with patch.object(Follower, "_follow", follow):
        yield


@contextmanager
def lost_reply_is_success() -> Iterator[None]:
    """A write whose reply was lost counts as done."""
    plain = Term._put

    def put(self: Term, objects: Any, what: str) -> None:
        try:
            self.store.put_batch(objects)
        except StoreUnavailable:
            return
        plain(self, objects, what)

    with patch.object(Term, "_put", put):
        yield


@contextmanager
def term_reused() -> Iterator[None]:
    """A lost outcome counts as a failure: the restarted writer goes on in its old term and uses the number again."""
    plain = Term.claim.__func__  # type: ignore[attr-defined]

    def claim(cls: Any, /, store: Any, channel: str, **more: Any) -> Term:
        for key, _ in newest(store.list(HEADS)).get(channel, []):
            if key.writer in more["own"].read():
                head = read_head(store, key)
                options, clock = more["options"], more["clock"]
                return Term(store, head, read_catchup(store, head), options, clock)
        found: Term = plain(cls, store, channel, **more)
        return found

    with patch.object(Term, "claim", classmethod(claim)):
        yield


@contextmanager
def torn_copies() -> Iterator[None]:
    """No mutant but a fault: the private copy that an anchor is made of has a flipped bit."""
    plain = Base.copy

    def copy(self: Base) -> Path:
        folder = plain(self)
        path = folder / "model.safetensors"
        data = bytearray(path.read_bytes())
        data[-1] ^= 4
        path.write_bytes(data)
        return folder

    with patch.object(Base, "copy", copy):
        yield


@contextmanager
def anchor_unverified() -> Iterator[None]:
    """An anchor is named without its digest having been recomputed from its files, and the copy was torn."""
    plain = Compactor._anchor
    wanted = dict[int, str]()

    def anchor(self: Compactor, manifest: Any, copy: Path, schema: Any) -> None:
        wanted[threading.get_ident()] = manifest.state_digest
        plain(self, manifest, copy, schema)

    def as_wanted(*_: object) -> Sums:
        return Sums.parse(wanted[threading.get_ident()])

    with torn_copies(), patch.object(Compactor, "_anchor", anchor), patch.object(sync.compact, "state_sums", as_wanted):
        yield


@contextmanager
def span_composed_backwards() -> Iterator[None]:
    """A span takes the last old and the first new values, and is sent without a look at the digest it reaches."""
    plain, wanted = Compactor._upload, dict[int, str]()

    def backwards(first: TensorPatch, second: TensorPatch) -> TensorPatch:
        return compose(second, first)

    def upload(self: Compactor, piece: Any, schema: Any) -> None:
        wanted[threading.get_ident()] = piece.end.state_digest
        plain(self, piece, schema)

    class AsWanted:
        @classmethod
        def parse(cls, _text: str) -> AsWanted:
            return cls()

        def minus(self, _other: Sums) -> AsWanted:
            return self

        plus = minus

        def text(self) -> str:
            return wanted[threading.get_ident()]

    with (
        patch.object(sync.compact, "compose", backwards),
        patch.object(Compactor, "_upload", upload),
        patch.object(sync.compact, "Sums", AsWanted),
    ):
        yield


MUTANTS: dict[str, tuple[Mutant, Callable[[Random], Setup] | str, set[str]]] = {
    "head before objects": (head_before_objects, lossy, {"I1"}),
    "base before commit": (base_before_commit, drawn, {"I7"}),
    "no look for rivals": (no_fence, rivals, {"I4"}),
    "no settling": (no_settling, "claim_tie_under_stale_listing", {"I4"}),
    "pins ignored": (pins_ignored, "a_pin_between_plan_and_delete", {"I6"}),
    "grace ignored": (grace_ignored, "an_old_head_that_comes_back_after_a_sweep", {"I1"}),
    "floor not raised": (floor_not_raised, calm, {"I6"}),
    "digests ignored": (digests_ignored, "a_reader_on_a_fork", {"I2"}),
    "hashes ignored": (hashes_ignored, damaged, {"I2"}),
    "engine patched in doubt": (engine_patched_in_doubt, damaged, {"I2"}),
    "older heads followed": (older_heads_followed, stale, {"I3"}),
    "lost reply is success": (lost_reply_is_success, lossy, {"I1", "I7"}),
    "term reused": (term_reused, lossy, {"I4"}),
    "anchor unverified": (anchor_unverified, calm, {"I5"}),
    "span composed backwards": (span_composed_backwards, spans, {"I5"}),
}
"""name → (mutant, the setup or the named schedule that shows it, the promises that may fall)."""


def caught(name: str, seeds: int = 60) -> tuple[int, str] | None:
    """Play seeds with a mutant; returns the first seed that catches it and the promise that fell."""
    mutant, setup, promises = MUTANTS[name]
    for seed in range(seeds):
        try:
            with mutant():
                if isinstance(setup, str):
                    play_named(setup, seed)
                else:
                    with Play(seed, setup(Random(f"setup {seed}"))) as stage:
                        stage.random()
        except Broken as error:
            if error.promise in promises:
                return seed, error.promise
        except (AssertionError, DeltawireError):  # a mutant may break the library in more ways than one
            continue
    return None
