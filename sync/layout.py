"""The key grammar of a run in a bucket: build and parse as exact inverses. The only place that knows paths.

heads/<channel>-<epoch:06d>-<writer>.json
<channel>/versions/<version:010d>-<epoch:06d>-<writer>/{manifest.json, delta.safetensors | document.json}
<channel>/anchors/<same folder name>/{manifest.json, config.json, model*.safetensors, …}
<channel>/spans/<from:010d>-<to:010d>-<epoch:06d>-<writer>/{manifest.json, delta.safetensors}
<channel>/catchup/<version:010d>-<epoch:06d>-<writer or random>.json
<channel>/pins/<id>.json
<channel>/plans/<version:010d>-<epoch:06d>-<random>.json
claims/<channel>-<random>.json    written and deleted at once, to read the store's clock
"""

from __future__ import annotations

import re
from typing import NamedTuple

from .errors import CorruptObject

HEADS = "heads/"
MANIFEST = "manifest.json"
DELTA = "delta.safetensors"
DOCUMENT = "document.json"
MODEL = "model.safetensors"
ADAPTER = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
INDEX = "model.safetensors.index.json"

_HEAD = re.compile(r"heads/([a-z][a-z0-9_]{0,31})-([0-9]{6})-([0-9a-f]{16})\.json")
_FOLDER = re.compile(
    r"([a-z][a-z0-9_]{0,31})/(?:(versions|anchors|catchup|plans)/([0-9]{10})|(spans)/([0-9]{10})-([0-9]{10}))"
    r"-([0-9]{6})-([0-9a-f]{16})(?:/[^/]+|\.json)"
)
_PIN = re.compile(r"([a-z][a-z0-9_]{0,31})/pins/([0-9a-f]{16})\.json")
_PART = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class HeadKey(NamedTuple):
    """The parts of a head's key."""

    channel: str
    epoch: int
    writer: str


def head_key(channel: str, epoch: int, writer: str) -> str:
    """The key of one term's head."""
    return f"{HEADS}{channel}-{epoch:06d}-{writer}.json"


def parse_head_key(key: str) -> HeadKey | None:
    """Parse a head's key; None for anything that is not one (foreign files are not ours to judge)."""
    match = _HEAD.fullmatch(key)
    return None if match is None else HeadKey(match[1], int(match[2]), match[3])


def delta_names(count: int) -> list[str]:
    """The names of a version's payload objects."""
    return [DELTA] if count == 1 else [f"delta-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]


def version_name(version: int, epoch: int, writer: str) -> str:
    """The folder name of a version, also that of an anchor made from it."""
    return f"{version:010d}-{epoch:06d}-{writer}"


def version_folder(channel: str, name: str) -> str:
    """The folder of a version, with a trailing slash."""
    return f"{channel}/versions/{name}/"


def anchor_folder(channel: str, name: str) -> str:
    """The folder of an anchor, with a trailing slash."""
    return f"{channel}/anchors/{name}/"


def catchup_key(channel: str, name: str) -> str:
    """The key of the catchup list that was written with version `name`."""
    return f"{channel}/catchup/{name}.json"


def span_folder(channel: str, start: int, version: int, epoch: int, writer: str) -> str:
    """The folder of a span from version `start` (not included) to `version`, with a trailing slash."""
    return f"{channel}/spans/{start:010d}-{version_name(version, epoch, writer)}/"


def pins_folder(channel: str) -> str:
    """Where a channel's pins are."""
    return f"{channel}/pins/"


def pin_key(channel: str, reader: str) -> str:
    """The key of one reader's pin; `reader` is 16 hex digits."""
    return f"{pins_folder(channel)}{reader}.json"


def is_pin(key: str) -> bool:
    """True for the key of a pin."""
    return _PIN.fullmatch(key) is not None


def plan_key(channel: str, name: str) -> str:
    """The key of the collecting plan written with the head of version `name`."""
    return f"{channel}/plans/{name}.json"


class ObjectKey(NamedTuple):
    """What the key of a version's, anchor's, span's, catchup list's or plan's object says.

    `start`: the version it leads from; its own for what stands alone.
    """

    channel: str
    area: str
    start: int
    version: int
    epoch: int
    writer: str


def parse_object_key(key: str) -> ObjectKey | None:
    """Parse the key of an immutable object of a channel; None for any other key."""
    match = _FOLDER.fullmatch(key)
    if match is None:
        return None
    channel, area, version, spans, start, reached, epoch, writer = match.groups()
    if spans is None:
        number = int(version)
        start = str(max(number - 1, 0)) if area == "versions" else version
        return ObjectKey(channel, area, int(start), number, int(epoch), writer)
    return ObjectKey(channel, spans, int(start), int(reached), int(epoch), writer)


def folder_of(key: str) -> str:
    """The folder of a key, with a trailing slash; "" for a key without one."""
    return key[: key.rfind("/") + 1]


def is_key_part(name: str) -> bool:
    """True for a name that may stand between the slashes of a key."""
    return _PART.fullmatch(name) is not None


def check_key(key: str) -> str:
    """Return `key` if every part is plain (no `..`, no absolute path, no odd character); raises CorruptObject."""
    if len(key) > 512 or not all(_PART.fullmatch(part) for part in key.split("/")):
        raise CorruptObject(f"{key!r} is not a key of a run: parts may hold letters, digits, dot, dash, underscore")
    return key
