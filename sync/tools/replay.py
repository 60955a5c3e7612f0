"""Replay a weights channel from its live anchors to the head, comparing every declared digest (I5), in one pass.

    anchor ──delta──▶ ● ──delta──▶ ● ──delta──▶ ● head
                      │ spans that start here: decoded, their end digest compared, nothing written
                      └ an anchor of this version: its files must equal the state, bit for bit

An anchor that equals the state reached leads to the same states from there on, so nothing is replayed twice.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from .. import layout
from ..errors import CorruptObject, RejectError, ResyncError
from ..events import emitter
from ..replica import Replica
from ..schema.base import Identity
from ..schema.wire import Head, Ref
from ..stores.base import Store
from ..tensors import bits
from .findings import text_of
from .scratch import Scratch


@dataclass
class Replayed:
    """passed: by key the references whose objects, digests and effect are right; failed: key of a reference → why;
    reached: the newest version reached."""

    passed: dict[str, Ref] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    reached: Identity | None = None

    @property
    def folders(self) -> set[str]:
        """Folders of which every object was read and compared."""
        return {layout.folder_of(key) for key in self.passed}


def replay(store: Store, head: Head, refs: tuple[Ref, ...], scratch: Path) -> Replayed:
    """Replay everything that the head names; `scratch` gets room for two full states. Raises StoreUnavailable."""
    return _Replay(store, head, refs, scratch).run()


class _Replay:
    def __init__(self, store: Store, head: Head, refs: tuple[Ref, ...], scratch: Path) -> None:
        self._head, self._done = head, Replayed()
        self._anchors = [r for r in refs if r.kind == "anchor"]
        self._deltas = {(r.from_version, r.base_digest): r for r in refs if r.kind == "delta"}
        self._spans: dict[tuple[int | None, str | None], list[Ref]] = defaultdict(list)
        for ref in refs:
            if ref.kind == "span":
                self._spans[ref.from_version, ref.base_digest].append(ref)
        quiet = emitter("verify", "none")
        self._main = Replica(store, Scratch(scratch / "state"), quiet)
        self._other = Replica(store, Scratch(scratch / "anchor"), quiet)

    def run(self) -> Replayed:
        try:
            for anchor in self._anchors:
                if not self._seen(anchor) and self._attempt(self._main, anchor):
                    self._follow()
        finally:
            self._main.mirror.close()
            self._other.mirror.close()
        return self._done

    def _follow(self) -> None:
        """Go from where the state is as far as deltas lead."""
        mirror = self._main.mirror
        assert isinstance(mirror, Scratch)
        while (held := mirror.held) is not None:
            self._done.reached = max(held.identity, self._done.reached or held.identity)
            place = (held.identity.version, held.digest)
            mirror.looking = True
            for ref in self._spans.pop(place, []):
                self._attempt(self._main, ref)
            mirror.looking = False
            for anchor in self._anchors:
                if anchor.identity == held.identity and not self._seen(anchor):
                    self._compare(anchor)
            after = self._deltas.get(place)
            if after is None or not self._attempt(self._main, after):
                return

    def _compare(self, anchor: Ref) -> None:
        if not self._attempt(self._other, anchor):
            return
        ours, theirs = self._main.mirror.state, self._other.mirror.state
        same = self._main.mirror.schema == self._other.mirror.schema
        if not same or not all(np.array_equal(bits(ours[n]), bits(theirs[n])) for n in ours):
            del self._done.passed[anchor.key]
            self._done.failed[anchor.key] = "its files differ from the state that the deltas lead to"

    def _attempt(self, replica: Replica, ref: Ref) -> bool:
        try:
            replica.step(ref, self._head)
        except (RejectError, ResyncError) as error:
            self._done.failed[ref.key] = text_of(error)
            return False
        self._done.passed[ref.key] = ref
        return True

    def _seen(self, ref: Ref) -> bool:
        return ref.key in self._done.failed or ref.key in self._done.passed


def expect_head(head: Head, done: Replayed) -> None:
    """Raise CorruptObject when nothing that failed explains why the head was not reached."""
    if head.identity is not None and done.reached != head.identity and not done.failed:
        raise CorruptObject(f"no live anchor leads to {head.identity}; the newest version reached is {done.reached}")
