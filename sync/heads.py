"""Find the newest head of every channel with one listing."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from .clock import REAL, Clock
from .errors import CorruptObject, ObjectMissing
from .fetch import checked_bytes
from .layout import HEADS, HeadKey, head_key, parse_head_key
from .schema.wire import Catchup, Head, Ref, parse
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


def read_catchup(store: Store, head: Head) -> tuple[Ref, ...]:
    """Read and verify the catchup list that a head names; () when it names none. Raises CorruptObject."""
    if head.catchup is None:
        return ()
    ref = head.catchup
    listing = parse(Catchup, checked_bytes(store, ref.key, ref.size, ref.sha256), ref.key)
    return listing.refs


class _Seen(NamedTuple):
    """A head, the listing entry it was read for, and until when that read may have been stale (None: it is not)."""

    etag: str
    head: Head
    sure_at: float | None


class HeadWatcher:
    """Remembers the heads of some channels between polls: a poll is one listing, and a read per head that changed.

    While two writers share the highest epoch of a channel (a split) its last known head is kept. A store whose reads
    may trail its listings (`lag`) can answer with the bytes before: a head is read again until that time has passed.
    """

    def __init__(self, store: Store, *channels: str, clock: Clock = REAL) -> None:
        self._store, self._channels, self._clock = store, channels, clock
        self._known: dict[str, _Seen] = {}

    @property
    def known(self) -> dict[str, Head]:
        """The newest head seen of every channel."""
        return {channel: seen.head for channel, seen in self._known.items()}

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
            etag, seen = f"{info.key} {info.etag} {info.size}", self._known.get(channel)
            changed = seen is None or seen.etag != etag
            if seen is not None and not changed and seen.sure_at is None:
                continue
            now = self._clock.monotonic()
            sure_at = now + self._store.lag if seen is None or changed else seen.sure_at
            try:
                head = read_head(self._store, key)
                self._known[channel] = _Seen(etag, head, None if sure_at is None or now >= sure_at else sure_at)
            except ObjectMissing:
                continue  # listed but gone: a stale listing; the next poll sees what is there
            except CorruptObject as error:
                damaged = error
        if damaged is not None:
            raise damaged
        return self.known
