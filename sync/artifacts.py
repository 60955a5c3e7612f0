"""Follow an artifact channel: the newest verified document, or the last good one."""

from __future__ import annotations

from . import layout
from .errors import CorruptObject
from .fetch import read_object
from .heads import HeadWatcher
from .schema.artifacts import Artifact, parse_artifact
from .schema.base import Identity
from .stores.base import Store


class ArtifactFollower:
    """Follows the artifact channels of one run; one listing per poll covers all of them."""

    def __init__(self, store: Store, *channels: str) -> None:
        self._store, self._channels = store, channels
        self._heads = HeadWatcher(store)
        self._held: dict[str, tuple[Identity, Artifact]] = {}

    def poll(self) -> dict[str, tuple[Identity, Artifact]]:
        """Look once; returns channel → (identity, artifact) for every channel that has a version.

        Raises CorruptObject naming a damaged or unreadable document, StoreUnavailable when the bucket does not answer;
        what was held before is kept either way and returned by `held`.
        """
        heads = self._heads.look()
        for channel in self._channels:
            head = heads.get(channel)
            if head is None or head.manifest is None or not head.recent:
                continue
            target, held = head.manifest.identity, self._held.get(channel)
            if held is not None and target <= held[0]:
                continue
            manifest = head.manifest
            ref = next((r for r in head.recent if r.identity == target), None)
            if ref is None or manifest.kind != "document":
                raise CorruptObject(f"{channel}: head {target} is a {manifest.kind}, expected a document it references")
            data = read_object(self._store, ref, manifest, layout.DOCUMENT)
            self._held[channel] = (target, parse_artifact(channel, data, layout.folder_of(ref.key) + layout.DOCUMENT))
        return self.held

    @property
    def held(self) -> dict[str, tuple[Identity, Artifact]]:
        """What was read so far."""
        return dict(self._held)
