"""Listings of a bucket: what a prefix shows, page by page.

As on the real Hub a prefix is matched as text: `logs` also shows `logs.json` and `logs_backup`. A recursive listing
shows files only; a flat one shows the files and folders right below the prefix, when that is a folder, and beside it.
"""

from __future__ import annotations

import base64
import binascii

from .buckets import Entry, View, after_prefix
from .responses import HubError

Item = Entry | tuple[str, int]
"""A file, or a folder as (path, newest upload below it)."""

_FLAT_CHUNK = 64


def page(view: View, prefix: str, *, recursive: bool, cursor: str | None, limit: int) -> tuple[list[Item], str | None]:
    """Up to `limit` items, and the cursor of the next page (None: this is the last). Raises HubError 400."""
    lower = prefix.encode("utf-8", "replace")
    upper = after_prefix(lower)
    if cursor is not None:
        lower = max(lower, _decode(cursor))
    return _recursive(view, lower, upper, limit) if recursive else _flat(view, prefix, lower, upper, limit)


def _recursive(view: View, lower: bytes, upper: bytes | None, limit: int) -> tuple[list[Item], str | None]:
    items: list[Item] = []
    for entry in view.scan(lower, upper, chunk=limit + 1):
        if len(items) == limit:
            return items, _encode(entry.path.encode())
        items.append(entry)
    return items, None


def _flat(view: View, prefix: str, lower: bytes, upper: bytes | None, limit: int) -> tuple[list[Item], str | None]:
    items: list[Item] = []
    while True:
        for entry in view.scan(lower, upper, chunk=_FLAT_CHUNK):
            if len(items) == limit:
                return items, _encode(entry.path.encode())
            folder = _folder(entry.path, prefix)
            if folder is None:
                items.append(entry)
                continue
            inside = folder.encode() + b"/"
            lower = folder.encode() + b"0"  # the byte after the slash: past everything in the folder
            items.append((folder, view.latest(inside, lower)))
            break
        else:
            return items, None


def _folder(path: str, prefix: str) -> str | None:
    """The folder that stands for `path` in a flat listing of `prefix`; None: the file itself is shown."""
    if not prefix or prefix.endswith("/"):
        base = len(prefix)
    elif path.startswith(prefix + "/"):
        base = len(prefix) + 1
    else:
        base = prefix.rfind("/") + 1
    slash = path.find("/", base)
    return None if slash < 0 else path[:slash]


def _encode(key: bytes) -> str:
    return base64.urlsafe_b64encode(key).decode()


def _decode(cursor: str) -> bytes:
    try:
        return base64.b64decode(cursor, altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        raise HubError(400, "cursor is not one that this Hub gave; list again from the start") from None
