"""Find the newest head of every channel with one listing."""

from __future__ import annotations

from collections import defaultdict

from .errors import CorruptObject, ObjectMissing
from .layout import HEADS, HeadKey, head_key, parse_head_key
from .schema.wire import Head, parse
from .stores.base import ObjectInfo, Store

HEAD_LIMIT = 4 * 1024 * 1024


def newest(listing: list[ObjectInfo]) -> dict[str, list[tuple[HeadKey, ObjectInfo]]]:
    """Per channel the heads of its highest epoch: one, or several when two writers claimed the same epoch."""
    by_channel: dict[str, list[tuple[HeadKey, ObjectInfo]]] = defaultdict(list)
    for info in listing:
        key = parse_head_key(info.key)
        if key is not None:
            by_channel[key.channel].append((key, info))
    return {
        channel: [(key, info) for key, info in found if key.epoch == max(k.epoch for k, _ in found)]
        for channel, found in by_channel.items()
    }


def read_head(store: Store, key: HeadKey) -> Head:
    """Read and verify one head. Raises CorruptObject when its content does not belong to its key."""
    name = head_key(*key)
    head = parse(Head, store.get(name, limit=HEAD_LIMIT), name)
    if (head.channel, head.epoch, head.writer) != tuple(key):
        raise CorruptObject(f"{name}: holds the head of {head.channel}-{head.epoch}-{head.writer}")
    return head


class HeadWatcher:
    """Remembers the heads of some channels between polls: a poll is one listing, and a read per head that changed.

    While two writers share the highest epoch of a channel (a split) its last known head is kept.
    """

    def __init__(self, store: Store, *channels: str) -> None:
        self._store, self._channels = store, channels
        self._known: dict[str, tuple[str, Head]] = {}

    @property
    def known(self) -> dict[str, Head]:
        """The newest head seen of every channel."""
        return {channel: head for channel, (_, head) in self._known.items()}

    def look(self) -> dict[str, Head]:
        """The newest head of every channel. Raises StoreUnavailable, or CorruptObject naming a damaged head, after the
        other channels' heads were read."""
        listing = newest(self._store.list(HEADS))
        damaged: CorruptObject | None = None
        for channel in self._channels:
            found = listing.get(channel, [])
            if len(found) != 1:
                continue
            key, info = found[0]
            etag = f"{info.key} {info.etag} {info.size}"
            if self._known.get(channel, ("", None))[0] == etag:
                continue
            try:
                self._known[channel] = (etag, read_head(self._store, key))
            except ObjectMissing:
                continue  # listed but gone: a stale listing; the next poll sees what is there
            except CorruptObject as error:
                damaged = error
        if damaged is not None:
            raise damaged
        return self.known
