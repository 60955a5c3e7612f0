"""Follow an artifact channel: the newest verified document, or the last good one."""

from __future__ import annotations

from . import layout
from .errors import CorruptObject
from .fetch import read_object
from .heads import HeadWatcher
from .schema.artifacts import Artifact, parse_artifact
from .schema.base import Identity
from .schema.wire import Head
from .stores.base import Store


class ArtifactFollower:
    """Follows the artifact channels of one run; one listing per poll covers all of them."""

    def __init__(self, store: Store, *channels: str) -> None:
        self._store = store
        self._heads = HeadWatcher(store, *channels)
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
        if manifest is None or not head.recent:
            return
        target = manifest.identity
        if held is not None and target <= held[0] and self._uids[channel] == head.channel_uid:
            return
        ref = next((r for r in head.recent if r.identity == target), None)
        if ref is None or manifest.kind != "document":
            raise CorruptObject(f"{channel}: head {target} is a {manifest.kind}, expected a document it references")
        data = read_object(self._store, ref, manifest, layout.DOCUMENT)
        self._held[channel] = (target, parse_artifact(channel, data, layout.folder_of(ref.key) + layout.DOCUMENT))
        self._uids[channel] = head.channel_uid

    @property
    def held(self) -> dict[str, tuple[Identity, Artifact]]:
        """What was read so far."""
        return dict(self._held)
