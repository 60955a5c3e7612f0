"""Stores: where a run's objects live. `open_store(url)` picks one by URL."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

from ..errors import ConfigError
from .base import ObjectInfo, Store
from .directory import DirectoryStore
from .memory import MemoryStore

__all__ = ["DirectoryStore", "MemoryStore", "ObjectInfo", "Store", "open_store"]


def open_store(url: str, *, create: bool = False, writable: bool = False) -> Store:
    """Open the store of a run: `file:///dir` or a plain folder path.

    Raises ConfigError when the URL is of no known kind, or the folder is missing (unless `create`) or unusable.
    """
    parts = urlsplit(url)
    if parts.scheme == "file":
        if parts.netloc not in ("", "localhost") or not parts.path:
            raise ConfigError(f"{url!r}: a folder is written file:///absolute/path")
        return DirectoryStore(Path(unquote(parts.path)), create=create, writable=writable)
    if parts.scheme == "" and url:
        return DirectoryStore(Path(url), create=create, writable=writable)
    if parts.scheme == "memory":
        raise ConfigError("memory: is a store inside one process; processes that meet need file:///dir")
    raise ConfigError(f"{url!r} is not a run URL this version can open; use file:///dir or a folder path")
