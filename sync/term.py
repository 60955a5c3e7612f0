"""One writer's term on a channel: claim it, commit versions in it, notice when another writer took over.

A commit is two batches: the version's objects, then the head with the manifest embedded. The head only ever names
objects that were confirmed before it was written. A bucket has no compare-and-swap, so a second writer is detected,
not prevented: each term writes a head file of its own, and the higher epoch wins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from . import layout
from .canonical import sha256_hex
from .clock import REAL, Clock
from .errors import ConfigError, Fenced, StopError, StoreUnavailable
from .fetch import checked_bytes
from .heads import newest, read_head
from .schema.wire import MAX_RECENT, Catchup, CatchupRef, Head, Manifest, ObjectEntry, Parent, Ref, parse
from .stores.base import Store

TAKEOVER_SECONDS = 600.0


@dataclass(frozen=True)
class TermOptions:
    """settle: seconds between a claim and the look for rivals. deadline: seconds a commit may be retried.

    catchup_every: versions between two catchup lists. keep_anchors: anchors (and what follows the oldest of them)
    that the catchup list names; a follower that is further behind takes the newest anchor.
    """

    settle: float = 0.0
    deadline: float = 120.0
    catchup_every: int = 16
    keep_anchors: int = 2

    def __post_init__(self) -> None:
        if not 0 <= self.catchup_every <= MAX_RECENT - 2 or self.keep_anchors < 1:
            raise ConfigError(
                f"catchup_every is {self.catchup_every} (0 to {MAX_RECENT - 2} is possible), keep_anchors is "
                f"{self.keep_anchors} (1 or more)"
            )


class Term:
    """A claimed term. Not thread-safe: one thread commits.

    After any raised error the term is `over`: every later call raises StopError and writes nothing, because a version
    number whose outcome is unknown must not get another content.
    """

    def __init__(self, store: Store, head: Head, known: tuple[Ref, ...], options: TermOptions, clock: Clock) -> None:
        self._store, self._options, self._clock = store, options, clock
        self._known = known
        self._anchored = False
        self.head = head
        self.over = False

    @classmethod
    def claim(
        cls, store: Store, channel: str, *, takeover: bool = False, options: TermOptions | None = None,
        clock: Clock = REAL,
    ) -> Term:  # fmt: skip
        """Claim the next epoch of a channel (a new channel starts at epoch 1).

        Raises Fenced when the present head is younger than 10 minutes by the store's clock, not closed, and
        `takeover` is not set; or when a rival claimed the same epoch meanwhile.
        """
        options = options or TermOptions()
        writer = clock.token_hex(8)
        heads = newest(store.list(layout.HEADS)).get(channel, [])
        adopted = [read_head(store, key) for key, _ in heads]
        if heads and not takeover and not all(h.closed for h in adopted):
            _refuse_if_young(store, channel, max(i.uploaded_at for _, i in heads), writer)
        old = max(adopted, key=lambda h: h.version if h.version is not None else -1, default=None)
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
        known = () if old is None else (*read_catchup(store, old), *old.recent)
        term = cls(store, head, known, options, clock)
        with term._step():
            term._put({layout.head_key(channel, head.epoch, writer): head.to_bytes()}, "claim")
            clock.sleep(options.settle)
            term.check_fence()
        return term

    @property
    def next_version(self) -> int:
        """The number that the next commit gets."""
        return 0 if self.head.version is None else self.head.version + 1

    def check_fence(self) -> None:
        """Raise Fenced when the store lists a head of our epoch or above that is not ours."""
        ours = layout.HeadKey(self.head.channel, self.head.epoch, self.head.writer)

        def look() -> None:
            for key, info in newest(self._store.list(layout.HEADS)).get(ours.channel, []):
                if key.epoch >= ours.epoch and key != ours:
                    raise Fenced(
                        f"channel {ours.channel!r} of {self._store.url} was claimed by writer {key.writer} (epoch "
                        f"{key.epoch}) at {info.uploaded_at:.0f}; this writer ({ours.writer}, epoch {ours.epoch}) stops"
                    )

        self._retried(look, f"the look for rivals of epoch {ours.epoch}")

    def commit(self, kind: str, objects: Mapping[str, bytes], facts: Mapping[str, Any]) -> Manifest:
        """Commit the next version from its objects (name → bytes) and manifest fields (`facts`).

        Returns the manifest when the head that embeds it is confirmed. Raises StoreUnavailable at the deadline (the
        outcome is then unknown) and Fenced when another writer took over.
        """
        with self._step():
            return self._commit(kind, objects, facts)

    def _commit(self, kind: str, objects: Mapping[str, bytes], facts: Mapping[str, Any]) -> Manifest:
        version = self.next_version
        name = layout.version_name(version, self.head.epoch, self.head.writer)
        place = layout.anchor_folder if kind == "anchor" else layout.version_folder
        folder = place(self.head.channel, name)
        manifest = self._manifest(kind, version, objects, facts)
        batch = {folder + n: data for n, data in objects.items()} | {folder + layout.MANIFEST: manifest.to_bytes()}
        ref = Ref.to(manifest, folder + layout.MANIFEST)
        catchup, recent = self.head.catchup, (*self.head.recent, ref)
        if self._anchored or kind == "anchor" or len(recent) > self._options.catchup_every:
            self._known = _live(self._known, self._options.keep_anchors)
            key = layout.catchup_key(self.head.channel, name)
            listing = Catchup(channel=self.head.channel, channel_uid=self.head.channel_uid, refs=self._known)
            batch[key] = listing.to_bytes()
            catchup, recent = CatchupRef(key=key, size=len(batch[key]), sha256=sha256_hex(batch[key])), (ref,)
        self._put(batch, f"version {manifest.identity}")
        changes = {"version": version, "manifest": manifest, "catchup": catchup, "recent": recent}
        self._write_head(self.head.model_copy(update=changes))
        self._known, self._anchored = (*self._known, ref), False
        return manifest

    def add_anchor(self, version: Manifest, objects: Mapping[str, bytes]) -> None:
        """Store a complete checkpoint of an already committed version; the next catchup list names it."""
        name = layout.version_name(version.version, version.epoch, version.writer)
        folder = layout.anchor_folder(self.head.channel, name)
        facts = {"kind": "anchor", "objects": _entries(objects), "base_digest": None, "parent": None, "codec": ""}
        manifest = version.model_copy(update=facts)
        batch = {folder + n: data for n, data in objects.items()} | {folder + layout.MANIFEST: manifest.to_bytes()}
        with self._step():
            self._put(batch, f"anchor {version.identity}")
        self._known = (*self._known, Ref.to(manifest, folder + layout.MANIFEST))
        self._anchored = True

    def close(self) -> None:
        """Say in the head that this term publishes nothing more."""
        with self._step():
            self._write_head(self.head.model_copy(update={"closed": True}))

    @contextmanager
    def _step(self) -> Iterator[None]:
        if self.over:
            raise StopError(
                f"the term of writer {self.head.writer} on {self.head.channel!r} ended with an earlier error; open the "
                "channel again, which claims a new epoch"
            )
        self.over = True
        yield
        self.over = False

    def _manifest(self, kind: str, version: int, objects: Mapping[str, bytes], facts: Mapping[str, Any]) -> Manifest:
        last = self.head.manifest
        parent = None if last is None else Parent(epoch=last.epoch, version=last.version, sha256=last.sha256())
        return Manifest.model_validate(
            {
                "channel": self.head.channel, "channel_uid": self.head.channel_uid, "epoch": self.head.epoch,
                "version": version, "writer": self.head.writer, "kind": kind, "parent": parent, "base_digest": None,
                "objects": _entries(objects), "created_at": self._clock.now(), **facts,
            }
        )  # fmt: skip

    def _write_head(self, head: Head) -> None:
        self._put({layout.head_key(head.channel, head.epoch, head.writer): head.to_bytes()}, f"head {head.identity}")
        self.head = head
        self.check_fence()

    def _put(self, objects: Mapping[str, bytes], what: str) -> None:
        """Write a batch and confirm it. A lost reply is settled by writing the same bytes again: an object of the right
        size may be the one before it."""

        def put() -> None:
            self._store.put_batch(objects)
            seen = self._store.info(objects)
            for key, data in objects.items():
                if key not in seen or seen[key].size != len(data):
                    raise StoreUnavailable(f"{key} is not listed with its size after it was written")

        self._retried(put, what)

    def _retried(self, attempt: Callable[[], None], what: str) -> None:
        give_up = self._clock.monotonic() + self._options.deadline
        pause = 0.1
        while True:
            try:
                return attempt()
            except StoreUnavailable as error:
                if self._clock.monotonic() >= give_up:
                    raise StoreUnavailable(
                        f"{what} could not be confirmed within {self._options.deadline:.0f} s ({error}); its outcome "
                        "is unknown, so this term ends: start again, which claims a new epoch"
                    ) from None
            self._clock.sleep(pause)
            pause = min(pause * 2, 5.0)


def read_catchup(store: Store, head: Head) -> tuple[Ref, ...]:
    """Read and verify the catchup list that a head names; () when it names none. Raises CorruptObject."""
    if head.catchup is None:
        return ()
    ref = head.catchup
    listing = parse(Catchup, checked_bytes(store, ref.key, ref.size, ref.sha256), ref.key)
    return listing.refs


def _refuse_if_young(store: Store, channel: str, uploaded_at: float, writer: str) -> None:
    probe = f"claims/{channel}-{writer}.json"
    store.put_batch({probe: b"{}"})
    seen = store.info([probe]).get(probe)
    store.delete([probe])
    if seen is None:
        raise StoreUnavailable(f"{store.url} does not show {probe} after it was written; try again")
    now = seen.uploaded_at  # the store's clock: no decision reads another machine's
    if now - uploaded_at < TAKEOVER_SECONDS:
        raise Fenced(
            f"channel {channel!r} of {store.url} was written {now - uploaded_at:.0f} s ago and is not closed; stop "
            "that writer and say --publishing.takeover true, or choose another run URL"
        )


def _entries(objects: Mapping[str, bytes]) -> tuple[ObjectEntry, ...]:
    return tuple(ObjectEntry(name=n, size=len(d), sha256=sha256_hex(d)) for n, d in sorted(objects.items()))


def _live(refs: tuple[Ref, ...], keep_anchors: int) -> tuple[Ref, ...]:
    """The newest anchors and every version after the oldest of them, in version order, anchors first."""
    anchors = sorted((r for r in refs if r.kind == "anchor"), key=lambda r: r.identity)[-keep_anchors:]
    if not anchors:
        return refs[-1:] if refs and refs[-1].kind == "document" else refs
    after = [r for r in refs if r.kind == "delta" and r.identity > anchors[0].identity]
    return tuple(sorted((*anchors, *after), key=lambda r: (r.identity, r.kind)))
