"""Pins: a reader's lease on everything between its version and the head.

A reader writes its pin and then reads the head again: a floor above the pin says that the pin came too late, and the
reader takes the newest anchor. The writer keeps its floor below every live pin, and looks again before it deletes.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from . import layout
from .clock import Clock
from .errors import ConfigError, CorruptObject, DeltawireError, ObjectMissing, StoreUnavailable
from .events import Emit
from .schema.base import Identity
from .schema.wire import MAX_TTL, Head, Pin, parse
from .stores.base import ObjectInfo, Store

PIN_LIMIT = 64 * 1024
MOVE_SECONDS = 60.0
READER = re.compile(r"[A-Za-z0-9 ._/-]{0,64}")


class Pinned(NamedTuple):
    """A pin as the store holds it."""

    pin: Pin
    info: ObjectInfo

    def expired(self, now: float) -> bool:
        """True when its time is over at `now`, a second of the store's clock."""
        return self.info.uploaded_at + self.pin.ttl < now


class Unreadable(NamedTuple):
    """An object where pins are that cannot be read as one: it may hold anything until it is older than any pin."""

    error: DeltawireError
    info: ObjectInfo

    def outlived(self, now: float) -> bool:
        """True when even the longest pin would have expired."""
        return self.info.uploaded_at + MAX_TTL < now


def read_pins(store: Store, channel: str, uid: str) -> tuple[list[Pinned], list[Unreadable]]:
    """Every pin of a channel, expired ones too, and what cannot be read. Pins of another channel uid, left from a run
    that was deleted, hold nothing and are left out."""
    found: list[Pinned] = []
    damaged: list[Unreadable] = []
    for info in store.list(layout.pins_folder(channel)):
        try:
            pin = parse(Pin, store.get(info.key, limit=PIN_LIMIT), info.key)
            if not layout.is_pin(info.key) or pin.channel != channel:
                raise CorruptObject(f"{info.key}: holds a pin of channel {pin.channel}, which does not belong there")
        except ObjectMissing:
            continue  # released meanwhile
        except (CorruptObject, ConfigError) as error:
            damaged.append(Unreadable(error, info))
        else:
            if pin.channel_uid == uid:
                found.append(Pinned(pin, info))
    return found, damaged


class ReaderPin:
    """One reader's pin: renewed every third of its time, and once a minute while the reader moves on, so that it holds
    no more than it must. A store that this reader may not write is followed without.

    ttl: seconds that the pin lives after each renewal; None: no pin is written.
    """

    def __init__(self, store: Store, channel: str, ttl: float | None, reader: str, clock: Clock, emit: Emit) -> None:
        if ttl is not None and not 0 < ttl <= MAX_TTL:
            raise ConfigError(f"a pin of {ttl} s: it may live up to {MAX_TTL} s (30 days)")
        if READER.fullmatch(reader) is None:
            raise ConfigError(f"{reader!r} is no reader's name: up to 64 letters, digits, spaces and ._/-")
        self._store, self._channel, self._ttl, self._reader = store, channel, ttl, reader
        self._clock, self._emit = clock, emit
        self._key = layout.pin_key(channel, clock.token_hex(8)) if ttl is not None else ""
        self._uid: str | None = None
        self._at: Identity | None = None
        self._written = 0.0

    def due(self, head: Head, held: Identity | None) -> bool:
        """True when the pin must be written (again)."""
        if self._ttl is None or head.channel_uid != self._uid:
            return self._ttl is not None
        age = self._clock.monotonic() - self._written
        moved = held is not None and held != self._at
        return age >= self._ttl / 3 or (moved and age >= MOVE_SECONDS)

    def write(self, head: Head, held: Identity | None) -> bool:
        """Pin what leads from `held` to the head (from the floor when nothing usable is held). True when the store took
        it; the caller then reads the head again."""
        assert self._ttl is not None
        at = held if held is not None and held.version >= head.floor else Identity(head.epoch, head.floor)
        pin = Pin(
            channel=self._channel, channel_uid=head.channel_uid, epoch=at.epoch, version=at.version, ttl=self._ttl,
            reader=self._reader,
        )  # fmt: skip
        try:
            self._store.put_batch({self._key: pin.to_bytes()})
        except ConfigError as error:
            self._emit("unpinned", why=str(error))
            self._ttl = None
            return False
        except StoreUnavailable as error:
            self._emit("unpinned", why=str(error))
            return False
        self._uid, self._at, self._written = head.channel_uid, held, self._clock.monotonic()
        return True

    def release(self) -> None:
        """Delete the pin; one that cannot be deleted expires."""
        if self._uid is not None:
            self._uid = None
            try:
                self._store.delete([self._key])
            except (StoreUnavailable, ConfigError) as error:
                self._emit("unpinned", why=str(error))
