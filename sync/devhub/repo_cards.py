"""The YAML at the top of a repository's README.md: read for what the Hub tells about a repository, never trusted."""

from __future__ import annotations

import math
import re
from functools import lru_cache
from typing import Any

import yaml  # type: ignore[import-untyped, unused-ignore]

from .blobs import Blobs
from .repo_trees import FileEntry, Trees

MAX_README_BYTES = 1 << 20
MAX_FRONT = 1 << 19
MAX_NODES = 50_000
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_FRONT = re.compile(r"\s*---[ \t]*\r?\n(.*?)\r?\n---[ \t]*(?:\r?\n|$)", re.DOTALL)


def parse_card(text: str) -> dict[str, Any]:
    """The mapping between the two `---` lines at the start of `text`, as plain JSON values; {} where there is none.

    Raises ValueError, in one line, for what is no YAML, no mapping, or far too much.
    """
    match = _FRONT.match(text)
    if match is None:
        return {}
    try:
        if len(match[1]) > MAX_FRONT:
            raise ValueError(f"the metadata has {len(match[1])} characters, the limit is {MAX_FRONT}")
        value = yaml.load(match[1], _LOADER)  # noqa: S506 - both loaders make plain values only
        _check_size(value)
        plain = {} if value is None else _plain(value)
    except (yaml.YAMLError, RecursionError, ValueError, OverflowError) as error:
        raise ValueError(" ".join(str(error).split())[:500]) from None
    if not isinstance(plain, dict):
        raise ValueError(f"expected a mapping of names to values, found {type(value).__name__}")  # noqa: TRY004
    return plain


def card_of(blobs: Blobs, trees: Trees, root: str) -> dict[str, Any]:
    """The metadata of a tree's README.md; {} where there is none or it cannot be read."""
    entry = trees.find(root, "README.md")
    if not isinstance(entry, FileEntry) or entry.lfs or entry.size > MAX_README_BYTES:
        return {}
    return dict(_read_card(blobs, entry.sha256))


@lru_cache(maxsize=512)
def _read_card(blobs: Blobs, sha256: str) -> dict[str, Any]:
    try:
        return parse_card(b"".join(blobs.read(sha256)).decode("utf-8", "replace"))
    except ValueError:
        return {}


def _check_size(value: object) -> None:
    """Raise ValueError above MAX_NODES values, counting what is named twice twice: a few lines can name billions."""
    waiting, seen = [value], 0
    while waiting:
        at = waiting.pop()
        seen += 1
        if seen > MAX_NODES:
            raise ValueError(f"the metadata holds more than {MAX_NODES} values")
        if isinstance(at, dict):
            waiting.extend(at.values())
        elif isinstance(at, list | tuple | set):
            waiting.extend(at)


def _plain(value: object) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(inside) for key, inside in value.items()}
    if isinstance(value, list | tuple | set):
        return [_plain(inside) for inside in value]
    if value is None or isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    return str(value).encode("utf-8", "replace").decode()
