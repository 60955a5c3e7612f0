"""Artifact channels: publish a document as the next version; follow the newest verified one, or the last good one."""

from __future__ import annotations

from pathlib import Path

from . import layout
from .canonical import canonical_json, sha256_hex
from .clock import REAL, Clock
from .errors import CorruptObject, InvalidRequest
from .fetch import read_object
from .heads import HeadWatcher
from .own_terms import OwnTerms
from .schema.artifacts import Artifact, parse_artifact
from .schema.base import Identity
from .schema.wire import Head
from .stores.base import Store
from .term import Term, TermOptions


class ArtifactFollower:
    """Follows the artifact channels of one run; one listing per poll covers all of them."""

    def __init__(self, store: Store, *channels: str, clock: Clock = REAL) -> None:
        self._store = store
        self._heads = HeadWatcher(store, *channels, clock=clock)
        self._left: set[str] = set()
        self._held: dict[str, tuple[Identity, Artifact]] = {}
        self._uids: dict[str, str] = {}

    def poll(self) -> dict[str, tuple[Identity, Artifact]]:
        """Look once; returns channel → (identity, artifact) for every channel that has a version.

        Raises CorruptObject naming a damaged or unreadable document, after the other channels were read, and
        StoreUnavailable when the bucket does not answer; what was held before is kept either way, see `held`.
        """
        damaged: CorruptObject | None = None
        try:
            self._heads.look()
        except CorruptObject as error:
            damaged = error
        for channel, head in self._heads.known.items():
            try:
                self._follow(channel, head)
            except CorruptObject as error:
                damaged = error
        if damaged is not None:
            raise damaged
        return self.held

    def _follow(self, channel: str, head: Head) -> None:
        manifest, held = head.manifest, self._held.get(channel)
        if manifest is None or not head.recent or head.channel_uid in self._left:
            return
        target = manifest.identity
        if held is not None and target <= held[0] and self._uids[channel] == head.channel_uid:
            return
        ref = next((r for r in head.recent if r.identity == target), None)
        if ref is None or manifest.kind != "document":
            raise CorruptObject(f"{channel}: head {target} is a {manifest.kind}, expected a document it references")
        data = read_object(self._store, ref, manifest, layout.DOCUMENT)
        artifact = parse_artifact(channel, data, layout.folder_of(ref.key) + layout.DOCUMENT)
        if self._uids.get(channel) not in (None, head.channel_uid):
            self._left.add(self._uids[channel])  # a stale look may show it again
        self._held[channel], self._uids[channel] = (target, artifact), head.channel_uid

    @property
    def held(self) -> dict[str, tuple[Identity, Artifact]]:
        """What was read so far."""
        return dict(self._held)


class ArtifactPublisher:
    """The one writer of an artifact channel; every call waits for its commit. work: see Publisher."""

    def __init__(
        self, store: Store, channel: str, *, options: TermOptions | None = None, clock: Clock = REAL,
        work: Path | None = None,
    ) -> None:  # fmt: skip
        self._store, self._channel, self._clock = store, channel, clock
        self._own = OwnTerms(work, channel)
        self._options = options
        self._term: Term | None = None

    @property
    def identity(self) -> Identity | None:
        """The last committed version."""
        return self._term.head.identity if self._term else None

    def open(self, *, takeover: bool = False) -> None:
        """Claim the channel. Raises Fenced when another writer owns it."""
        self._term = Term.claim(
            self._store, self._channel, takeover=takeover, options=self._options, clock=self._clock,
            own=self._own,
        )  # fmt: skip

    def publish(self, artifact: Artifact, *, measured_against: Identity | None, step: int = 0) -> Identity:
        """Commit `artifact` as the next version, with the weights version it was computed on.

        After an error this publisher is over (StopError); opening it again claims a new epoch.
        """
        if self._term is None:
            raise InvalidRequest("open the artifact publisher first")
        data = canonical_json(artifact.model_dump(mode="json"))
        facts = {
            "state_digest": f"sha256:{sha256_hex(data)}",
            "step": step,
            "measured_against": str(measured_against) if measured_against else None,
        }
        return self._term.commit("document", {layout.DOCUMENT: data}, facts).identity

    def close(self) -> None:
        """Mark the head closed; nothing is written when an error ended the term."""
        if self._term is not None and not self._term.head.closed and not self._term.over:
            self._term.close()
