"""Bring a mirror to a version: plan, read, verify, apply. What a follower, a resuming publisher and the tools share."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from . import layout
from .codec import decode, join
from .digest import moved
from .errors import (
    BaseMismatch,
    CorruptObject,
    DeltawireError,
    InvalidPatch,
    Pruned,
    RejectError,
    ResyncError,
    StoreUnavailable,
)
from .events import Emit
from .fetch import check_manifest, download, object_bytes, read_manifest
from .heads import read_catchup
from .mirror import Mirror, Patches
from .pieces import layout_of
from .plan import Held, plan
from .schema.base import Identity
from .schema.wire import Head, Manifest, Ref
from .stores.base import Store
from .tensors import state_bytes


class Replica:
    """A mirror and the store that it is brought up from. Use from one thread.

    count(name=n, …) is told of checks, objects and bytes; on_move(patches) of every move of the mirror, with what it
    wrote, or None when a whole anchor replaced it. Both are called as soon as the mirror has moved.
    """

    def __init__(
        self, store: Store, mirror: Mirror, emit: Emit, *,
        count: Callable[..., None] = lambda **_: None, on_move: Callable[[Patches | None], None] = lambda _: None,
    ) -> None:  # fmt: skip
        self.store, self.mirror, self.emit = store, mirror, emit
        self._count, self._on_move = count, on_move

    def go_to(self, target: Identity, head: Head) -> None:
        """Bring the mirror to `target`, a version that the head or its catchup list names.

        A damaged or missing object is gone around where another way exists, and a mirror whose bytes were changed by
        others is loaded anew. Raises Pruned when no way leads there, else
        what the last way failed with; the mirror then holds a declared version still.
        """
        refs, whole = head.recent, False
        if target != head.identity or not _next_to(head, self.mirror.held):
            refs, whole = self._all_refs(head), True
        failure: DeltawireError | None = None
        avoid: set[str] = set()
        damaged = False
        while True:
            try:
                way = plan(refs, target, self.mirror.held, avoid)
            except Pruned:
                if whole and failure is None:
                    raise
                if whole and failure is not None:
                    raise failure from None
                refs, whole = self._all_refs(head), True
                continue
            if failure is not None:
                self.emit("detour", around=getattr(failure, "ref_key", None), why=str(failure))
            try:
                if self._walk(way, head):
                    return
                if damaged:
                    raise CorruptObject("the mirror's bytes change by themselves; look at its disk")
                damaged = True
            except (RejectError, ResyncError, StoreUnavailable) as error:
                bad = getattr(error, "ref_key", None)
                if bad is None:
                    raise
                avoid.add(bad)
                failure = error

    def _walk(self, way: Iterable[Ref], head: Head) -> bool:
        """Take the steps; False when the mirror's bytes are found not to be what was written there, and dropped."""
        for ref in way:
            self.step(ref, head)
            if not self.mirror.audit_next():
                self._count(digest_failures=1)
                self.emit("mirror_damaged", version=self.mirror.identity)
                self.mirror.reset()
                return False
        return True

    def _all_refs(self, head: Head) -> tuple[Ref, ...]:
        return (*read_catchup(self.store, head), *head.recent)

    def step(self, ref: Ref, head: Head) -> None:
        """Apply one reference, checked first. An error carries the reference's key as `ref_key`."""
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
        manifest = read_manifest(self.store, ref)
        if manifest.channel_uid != head.channel_uid:
            raise CorruptObject(f"{ref.key}: belongs to channel {manifest.channel_uid}, not {head.channel_uid}")
        return manifest

    def _install(self, ref: Ref, manifest: Manifest) -> None:
        before = self.mirror.held
        try:
            self.mirror.install(
                manifest.channel_uid, manifest.identity, manifest.state_digest,
                lambda folder: download(self.store, ref, manifest, folder),
            )  # fmt: skip
        finally:  # the mirror may have moved although its disk failed behind
            if self.mirror.held != before:
                self._on_move(None)
        self._count(digest_checks=1, anchors_loaded=1, bytes_fetched=manifest.payload_bytes)
        self.emit("anchor", version=manifest.identity, bytes=manifest.payload_bytes)

    def _apply(self, ref: Ref, manifest: Manifest) -> None:
        mirror = self.mirror
        held = mirror.held
        if held is None or manifest.parent is None:
            raise BaseMismatch(f"{ref.key}: a {manifest.kind} needs a base and a parent, found {held}")
        parent = Identity(manifest.parent.epoch, manifest.parent.version)
        if (parent.version, manifest.base_digest) != (held.identity.version, held.digest) or parent > ref.identity:
            raise BaseMismatch(
                f"{ref.key}: made for version {parent} with state {manifest.base_digest}, the mirror holds "
                f"{held.identity} with {held.digest}"
            )
        patches: Patches = {}
        change = np.zeros((len(layout_of(mirror.schema).pieces), 2), np.uint64)
        for entry in manifest.objects:
            key = layout.folder_of(ref.key) + entry.name
            if entry.size > 2 * state_bytes(mirror.schema) + (1 << 20):
                raise CorruptObject(f"{key}: a delta of {entry.size} bytes for a smaller state")
            with (
                tempfile.TemporaryDirectory(dir=mirror.folder, prefix="part-") as scratch,
                object_bytes(self.store, key, entry.size, entry.sha256, Path(scratch)) as payload,
            ):
                try:
                    decoded = decode(payload, mirror.schema, mirror.state)
                    patches = join(patches, decoded.patches)
                except (InvalidPatch, BaseMismatch) as error:
                    raise type(error)(f"{key}: {error}") from None
            change += decoded.change
        sums = moved(mirror.sums, change)
        self._count(digest_checks=1)
        if sums.text() != manifest.state_digest:
            self._count(digest_failures=1)
            raise CorruptObject(f"{ref.key}: applying it gives {sums.text()}, declared {manifest.state_digest}")
        try:
            mirror.apply(patches, manifest.identity, change)
        finally:  # the mirror may have moved although its disk failed behind
            if mirror.identity == manifest.identity:
                self._on_move(patches)
        self._count(versions_applied=1, bytes_fetched=manifest.payload_bytes)
        self.emit(manifest.kind, version=manifest.identity, bytes=manifest.payload_bytes)


def _next_to(head: Head, held: Held | None) -> bool:
    """True when head.recent alone leads from what is held to the head."""
    return held is not None and any(
        (r.from_version, r.base_digest) == (held.identity.version, held.digest) for r in head.recent
    )
