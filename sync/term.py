"""One writer's term on a channel: claim it, commit versions in it, notice when another writer took over.

A commit is two batches: the version's objects, then the head with the manifest embedded. The head only ever names
objects that were confirmed before it was written. A bucket has no compare-and-swap, so a second writer is detected,
not prevented: each term writes a head file of its own, and the higher epoch wins.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from . import layout
from .canonical import seal, sha256_hex
from .clock import REAL, Clock
from .errors import ConfigError, Fenced, InvalidRequest, StopError, StoreUnavailable
from .heads import newest, read_catchup, read_head
from .own_terms import OwnTerms
from .schema.base import Identity
from .schema.wire import MAX_RECENT, Catchup, CatchupRef, Head, Manifest, ObjectEntry, Parent, Ref
from .stores.base import Content, ObjectInfo, Store, content_size

TAKEOVER_SECONDS = 600.0
MAX_EPOCH, MAX_VERSION = 999_999, 9_999_999_999
MAX_DOCUMENTS = 10_000
"""Artifact versions that a catchup list names; they are small, and rollouts name them long after."""


@dataclass(frozen=True)
class TermOptions:
    """settle: seconds between a claim and the look for rivals (None: the store's lag). deadline: seconds a write may be
    retried.

    catchup_every: references in a head before a catchup list is written. keep_anchors: anchors (and what follows the
    oldest of them) that are kept; a follower that is further behind takes the newest anchor. grace: seconds between a
    collecting plan and its deletes. collect_every: versions between two looks for what can be collected (0: never).
    """

    settle: float | None = None
    deadline: float = 120.0
    catchup_every: int = 16
    keep_anchors: int = 2
    grace: float = 3600.0
    collect_every: int = 64

    def __post_init__(self) -> None:
        if not 0 <= self.catchup_every <= MAX_RECENT // 2 or self.keep_anchors < 1:
            raise ConfigError(
                f"catchup_every is {self.catchup_every} (0 to {MAX_RECENT // 2} is possible), keep_anchors is "
                f"{self.keep_anchors} (1 or more)"
            )
        if self.grace < 0 or self.collect_every < 0:
            raise ConfigError(f"grace is {self.grace}, collect_every is {self.collect_every}: neither can be negative")


class Term:
    """A claimed term. One thread commits; `put_behind` and `add` may be called from one other.

    After any raised error of a claim, commit, refresh or close the term is `over`: every later call raises StopError
    and writes nothing, because a version number whose outcome is unknown must not get another content.
    """

    def __init__(self, store: Store, head: Head, listed: tuple[Ref, ...], options: TermOptions, clock: Clock) -> None:
        self.store, self.options, self._clock = store, options, clock
        self._listed = listed
        self._news: list[Ref] = []
        self._lock = threading.Lock()
        self.wanted_floor = head.floor
        self.now = 0.0
        self.head = head
        self.over = False

    @classmethod
    def claim(
        cls, store: Store, channel: str, *, takeover: bool = False, options: TermOptions | None = None,
        clock: Clock = REAL, own: OwnTerms | None = None, at_least: Identity | None = None,
    ) -> Term:  # fmt: skip
        """Claim the next epoch of a channel (a new channel starts at epoch 1).

        own: the terms that this process may go on from, to which the new one is added before it is written; at_least: a
        version that it knows to be committed in one of them, so that an older head is known to be a stale look.
        Raises Fenced when the present head is younger than 10 minutes by the store's clock, not closed, not the one
        that is resumed, and `takeover` is not set; or when a rival claimed the same epoch meanwhile.
        """
        options = options or TermOptions()
        writer = clock.token_hex(8)
        own = own or OwnTerms(None, channel)
        old, listed = _adopt(store, channel, options, clock, takeover=takeover, own=own.read(), at_least=at_least)
        if old is not None and old.epoch >= MAX_EPOCH:
            raise ConfigError(
                f"channel {channel!r} of {store.url} is at epoch {old.epoch}, the last one; use another run"
            )
        own.add(writer)
        head = Head(
            channel=channel,
            channel_uid=old.channel_uid if old else clock.token_hex(8),
            epoch=old.epoch + 1 if old else 1,
            writer=writer,
            version=old.version if old else None,
            floor=old.floor if old else 0,
            manifest=old.manifest if old else None,
            catchup=old.catchup if old else None,
            recent=old.recent if old else (),
        )
        term = cls(store, head, listed, options, clock)
        with term._step():
            term._put({layout.head_key(channel, head.epoch, writer): head.to_bytes()}, "claim")
            clock.sleep(store.lag if options.settle is None else options.settle)
            term.check_fence()
        return term

    @property
    def next_version(self) -> int:
        """The number that the next commit gets. Raises StopError after the last one that a key can hold."""
        number = 0 if self.head.version is None else self.head.version + 1
        if number > MAX_VERSION:
            raise StopError(f"channel {self.head.channel!r} has used up its version numbers; use another run")
        return number

    @property
    def refs(self) -> tuple[Ref, ...]:
        """Everything that the head and its catchup list name."""
        return (*self._listed, *self.head.recent)

    def check_fence(self) -> None:
        """Raise Fenced when the store lists a head of our epoch or above that is not ours. A listing that lacks our own
        head is stale and is asked for again, until the deadline."""
        self._retried(self._own_head, f"the look for rivals of epoch {self.head.epoch}")

    def _own_head(self) -> ObjectInfo:
        """Our head as the store lists it. Raises Fenced for a rival's, StoreUnavailable when ours is not there."""
        ours = layout.HeadKey(self.head.channel, self.head.epoch, self.head.writer)
        found = {k: i for i in self.store.list(layout.HEADS) if (k := layout.parse_head_key(i.key)) is not None}
        for key, info in found.items():
            if key.channel == ours.channel and key.epoch >= ours.epoch and key != ours:
                raise Fenced(
                    f"channel {ours.channel!r} of {self.store.url} was claimed by writer {key.writer} (epoch "
                    f"{key.epoch}) at {info.uploaded_at:.0f}; this writer ({ours.writer}, epoch {ours.epoch}) stops"
                )
        if ours not in found:
            raise StoreUnavailable(f"{layout.head_key(*ours)} was written but is not listed")
        return found[ours]

    def commit(
        self, kind: str, objects: Mapping[str, Content], facts: Mapping[str, Any], *,
        sent: Callable[[], None] = lambda: None,
    ) -> Manifest:  # fmt: skip
        """Commit the next version from its objects (name → content) and manifest fields (`facts`). `sent` is called
        when the head was sent and not yet confirmed: readers may look.

        Returns the manifest when the head that embeds it is confirmed. Raises StoreUnavailable at the deadline (the
        outcome is then unknown) and Fenced when another writer took over.
        """
        with self._step():
            version = self.next_version
            name = layout.version_name(version, self.head.epoch, self.head.writer)
            place = layout.anchor_folder if kind == "anchor" else layout.version_folder
            folder = place(self.head.channel, name)
            manifest = self._manifest(kind, version, objects, facts)
            batch: dict[str, Content] = {folder + n: data for n, data in objects.items()}
            batch[folder + layout.MANIFEST] = manifest.to_bytes()
            ref = Ref.to(manifest, folder + layout.MANIFEST)
            changes = self._names(name, batch, ref)
            self._put(batch, f"version {manifest.identity}")
            self._write_head(self.head.model_copy(update={"version": version, "manifest": manifest, **changes}), sent)
        return manifest

    def refresh(self, *, closed: bool = False) -> None:
        """Write the head again, with what was added since and the wanted floor; `closed`: this term publishes nothing
        more."""
        with self._step():
            changes: dict[str, Any] = {"closed": closed}
            if self._news or self.wanted_floor > self.head.floor:
                batch: dict[str, Content] = {}
                number = 0 if self.head.version is None else self.head.version
                name = layout.version_name(number, self.head.epoch, self.token())
                changes |= self._names(name, batch, None)
                if batch:
                    self._put(batch, "catchup list")
            self._write_head(self.head.model_copy(update=changes))

    def close(self) -> None:
        """Say in the head that this term publishes nothing more."""
        self.refresh(closed=True)

    def add(self, manifest: Manifest, folder: str) -> None:
        """Name a stored anchor or span from the next head on."""
        with self._lock:
            self._news.append(Ref.to(manifest, folder + layout.MANIFEST))

    def monotonic(self) -> float:
        """This machine's seconds, which never jump."""
        return self._clock.monotonic()

    def token(self) -> str:
        """16 random hex digits, for a name that is used once."""
        return self._clock.token_hex(8)

    @property
    def pending(self) -> set[str]:
        """Folders of what was added and no head names yet."""
        with self._lock:
            return {layout.folder_of(r.key) for r in self._news}

    def put_behind(self, objects: Mapping[str, Content], what: str) -> None:
        """Write objects that no head names yet. An error does not end the term; raises StopError when it is over."""
        if self.over:
            raise StopError(f"the term ended; {what} is not stored")
        self._put(objects, what)

    def _names(self, name: str, batch: dict[str, Content], ref: Ref | None) -> dict[str, Any]:
        """What the next head names: fields of it, with a new catchup list added to `batch` when one is due."""
        with self._lock:
            news = tuple(self._news)
        floor = max(self.head.floor, self.wanted_floor)
        recent = (*self.head.recent, *(r for r in news if _start(r) >= floor))
        own: tuple[Ref, ...] = () if ref is None else (ref,)
        anchored = any(r.kind == "anchor" for r in (*news, *own))
        if not anchored and floor == self.head.floor and len(recent) + len(own) <= self.options.catchup_every:
            return {"recent": (*recent, *own)}
        kept = live((*self._listed, *recent), floor)
        own = own or tuple(r for r in (*self._listed, *recent) if r.identity == self.head.identity)
        listing = Catchup(channel=self.head.channel, channel_uid=self.head.channel_uid, refs=kept)
        key = layout.catchup_key(self.head.channel, name)
        batch[key] = data = listing.to_bytes()
        self._listed = kept
        where = CatchupRef(key=key, size=len(data), sha256=sha256_hex(data))
        return {"catchup": where, "recent": own, "floor": floor}

    @contextmanager
    def _step(self) -> Iterator[None]:
        if self.over:
            raise StopError(
                f"the term of writer {self.head.writer} on {self.head.channel!r} ended with an earlier error; open the "
                "channel again, which claims a new epoch"
            )
        try:
            yield
        except BaseException:
            self.over = True
            raise

    def _manifest(self, kind: str, version: int, objects: Mapping[str, Content], facts: Mapping[str, Any]) -> Manifest:
        last = self.head.manifest
        parent = None if last is None else Parent(epoch=last.epoch, version=last.version, sha256=last.sha256())
        said = {
            "channel": self.head.channel, "channel_uid": self.head.channel_uid, "epoch": self.head.epoch,
            "version": version, "writer": self.head.writer, "kind": kind, "parent": parent, "base_digest": None,
            "objects": entries(objects), "created_at": self._clock.now(), **facts,
        }  # fmt: skip
        try:
            return Manifest.model_validate(said)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(str(p) for p in first["loc"])
            raise InvalidRequest(f"version {version} cannot be published: {where}: {first['msg']}") from None

    def _write_head(self, head: Head, sent: Callable[[], None] = lambda: None) -> None:
        data = head.to_bytes()

        def write() -> None:  # the listing that looks for rivals is also what confirms the head
            self.store.put_batch({layout.head_key(head.channel, head.epoch, head.writer): data})
            sent()
            info = self._own_head()
            if info.size != len(data):
                raise StoreUnavailable(f"{info.key} is not listed with its size after it was written")
            self.now = info.uploaded_at

        self._retried(write, f"head {head.identity}")
        self.head = head
        with self._lock:
            named = {r.key for r in (*head.recent, *self._listed)}
            self._news = [r for r in self._news if r.key not in named and _start(r) >= head.floor]

    def _put(self, objects: Mapping[str, Content], what: str) -> None:
        """Write a batch and confirm it. A lost reply is settled by writing the same bytes again: an object of the right
        size may be the one before it."""
        sizes = {key: content_size(content) for key, content in objects.items()}

        def put() -> None:
            self.store.put_batch(objects)
            seen = self.store.info(objects)
            for key, size in sizes.items():
                if key not in seen or seen[key].size != size:
                    raise StoreUnavailable(f"{key} is not listed with its size after it was written")
                self.now = seen[key].uploaded_at

        self._retried(put, what)

    def _retried(self, attempt: Callable[[], object], what: str) -> None:
        retried(
            attempt, self.options.deadline, self._clock,
            f"{what} could not be confirmed within {self.options.deadline:.0f} s",
            "; its outcome is unknown, so this term ends: start again, which claims a new epoch",
        )  # fmt: skip


def retried(attempt: Callable[[], object], deadline: float, clock: Clock, what: str, then: str = "") -> None:
    """Repeat `attempt` while it raises StoreUnavailable; at the deadline raise StoreUnavailable saying `what`."""
    give_up = clock.monotonic() + deadline
    pause = 0.1
    while True:
        try:
            attempt()
        except StoreUnavailable as error:
            if clock.monotonic() >= give_up:
                raise StoreUnavailable(f"{what} ({error}){then}") from None
        else:
            return
        clock.sleep(pause)
        pause = min(pause * 2, 5.0)


def entries(objects: Mapping[str, Content]) -> tuple[ObjectEntry, ...]:
    """The manifest's entries of some objects (name → content)."""
    return tuple(ObjectEntry(name=n, size=content_size(c), sha256=_sha256(c)) for n, c in sorted(objects.items()))


def live(refs: Iterable[Ref], floor: int) -> tuple[Ref, ...]:
    """The references of a catchup list: nothing that leads to or from below the floor, in order of version."""
    kept = {r.key: r for r in refs if r.kind == "document" or _start(r) >= floor}
    documents = [r for r in kept.values() if r.kind == "document"]
    late = {r.key for r in sorted(documents, key=lambda r: r.identity)[:-MAX_DOCUMENTS]}
    return tuple(sorted((r for r in kept.values() if r.key not in late), key=lambda r: (r.identity, r.kind, r.key)))


def _start(ref: Ref) -> int:
    return ref.version if ref.from_version is None else ref.from_version


def _sha256(content: Content) -> str:
    if not isinstance(content, Path):
        return sha256_hex(content)
    with content.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _adopt(
    store: Store, channel: str, options: TermOptions, clock: Clock, *,
    takeover: bool, own: tuple[str, ...], at_least: Identity | None,
) -> tuple[Head | None, tuple[Ref, ...]]:  # fmt: skip
    """The head that a claim goes on from and what its catchup list names; (None, ()) for a new channel."""
    adopted: list[Head] = []

    def look() -> None:
        heads = newest(store.list(layout.HEADS)).get(channel, [])
        adopted[:] = [read_head(store, key) for key, _ in heads]
        for (key, info), head in zip(heads, adopted, strict=True):
            if not (head.closed or takeover or key.writer in own):
                _refuse_if_young(store, channel, info.uploaded_at, clock.token_hex(8))
        ours = [h for h in adopted if h.writer in own and at_least is not None and h.epoch == at_least.epoch]
        if at_least is not None and any((h.identity or Identity(0, 0)) < at_least for h in ours):
            raise StoreUnavailable(f"the head shows less than {at_least}, which was committed: a stale look")

    retried(look, options.deadline, clock, f"the look for the heads of {channel!r} failed")
    old = max(adopted, key=lambda h: h.version if h.version is not None else -1, default=None)
    return old, () if old is None else read_catchup(store, old)


def _refuse_if_young(store: Store, channel: str, uploaded_at: float, probe_id: str) -> None:
    probe = f"claims/{channel}-{probe_id}.json"
    store.put_batch({probe: seal({"purpose": "reads the store's clock"})})
    seen = store.info([probe]).get(probe)
    store.delete([probe])
    if seen is None:
        raise StoreUnavailable(f"{store.url} does not show {probe} after it was written; try again")
    now = seen.uploaded_at  # the store's clock: no decision reads another machine's
    if now - uploaded_at < TAKEOVER_SECONDS:
        raise Fenced(
            f"channel {channel!r} of {store.url} was written {now - uploaded_at:.0f} s ago and is not closed; stop "
            "that writer and take over (--takeover), or choose another run URL"
        )
