"""Stores: where a run's objects live. `open_store(url)` picks one by URL."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

from ..errors import ConfigError
from .base import Content, ObjectInfo, Store, content_size
from .directory import DirectoryStore
from .memory import MemoryStore

__all__ = ["Content", "DirectoryStore", "MemoryStore", "ObjectInfo", "Store", "content_size", "open_store"]


def open_store(url: str, *, create: bool = False, writable: bool = False, lag: float | None = None) -> Store:
    """Open the store of a run: `hf://buckets/NAMESPACE/BUCKET/RUN`, `file:///dir` or a plain folder path.

    `lag`: how long this store's listings may trail, when its own default is not right. Raises ConfigError when the URL
    is of no known kind, or the bucket or folder is missing (unless `create`) or unusable; StoreUnavailable when the Hub
    does not answer.
    """
    store = _open(url, create=create, writable=writable)
    if lag is not None:
        store.lag = lag
    return store


def _open(url: str, *, create: bool, writable: bool) -> Store:
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise ConfigError(
            f"{url!r} is not a URL ({error}); use hf://buckets/NAMESPACE/BUCKET/RUN or file:///dir"
        ) from None
    if parts.scheme == "hf":
        from .hub import HubStore  # huggingface_hub loads on use

        return HubStore(url, create=create, writable=writable)
    if parts.scheme == "file":
        if parts.netloc not in ("", "localhost") or not parts.path:
            raise ConfigError(f"{url!r}: a folder is written file:///absolute/path")
        return DirectoryStore(Path(unquote(parts.path)), create=create, writable=writable)
    if parts.scheme == "" and url:
        return DirectoryStore(Path(url), create=create, writable=writable)
    if parts.scheme == "memory":
        raise ConfigError("memory: is a store inside one process; processes that meet need file:///dir")
    raise ConfigError(
        f"{url!r} is not a run URL this version can open; use hf://buckets/NAMESPACE/BUCKET/RUN, file:///dir or a "
        "folder path"
    )
