"""The key grammar of a run in a bucket: build and parse as exact inverses. The only place that knows paths.

heads/<channel>-<epoch:06d>-<writer>.json
<channel>/versions/<version:010d>-<epoch:06d>-<writer>/{manifest.json, delta.safetensors | document.json}
<channel>/anchors/<same folder name>/{manifest.json, config.json, model.safetensors, …}
<channel>/catchup/<version:010d>-<epoch:06d>-<writer>.json
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

_HEAD = re.compile(r"heads/([a-z][a-z0-9_]{0,31})-([0-9]{6})-([0-9a-f]{16})\.json")
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


def folder_of(key: str) -> str:
    """The folder of a key, with a trailing slash."""
    return key[: key.rindex("/") + 1]


def check_key(key: str) -> str:
    """Return `key` if every part is plain (no `..`, no absolute path, no odd character); raises CorruptObject."""
    if len(key) > 512 or not all(_PART.fullmatch(part) for part in key.split("/")):
        raise CorruptObject(f"{key!r} is not a key of a run: parts may hold letters, digits, dot, dash, underscore")
    return key
