"""The Store protocol: the little that a bucket can do. Promises are in each method; the contract suite checks them.

A bucket has no compare-and-swap, no transactions, possibly stale listings. Nothing here pretends otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple, Protocol, TypeAlias, runtime_checkable

Content: TypeAlias = bytes | Path
"""What a batch writes under a key: bytes, or a file that is read while it is sent (never whole in memory)."""


class ObjectInfo(NamedTuple):
    """One object as the store lists it.

    `uploaded_at`: seconds of the store's own clock. `etag`: changes whenever the content is written again.
    """

    key: str
    size: int
    uploaded_at: float
    etag: str


@runtime_checkable
class Store(Protocol):
    """Objects under keys of one run. Every method may raise StoreUnavailable, and may be called from several threads;
    keys are checked by `check_key`.

    `lag`: seconds that a listing or a look-up may trail behind the last write; writers wait that long after a claim.
    """

    url: str
    lag: float

    def put_batch(self, objects: Mapping[str, Content]) -> None:
        """Write all objects, in no promised order and not atomically; each single object appears whole or not at all.

        Returns only when all were accepted. A raised StoreUnavailable is an unknown outcome: any of them may exist.
        """
        ...

    def get(self, key: str, *, limit: int) -> bytes:
        """Return an object's bytes. Raises ObjectMissing, or CorruptObject when it is larger than `limit` bytes."""
        ...

    def fetch(self, key: str, path: Path, *, limit: int) -> None:
        """Download an object to `path` by way of a temporary name; same errors as `get`, and OSError when the disk of
        `path` is full."""
        ...

    def list(self, prefix: str) -> list[ObjectInfo]:
        """List the objects whose key starts with `prefix`, in key order. May be stale."""
        ...

    def info(self, keys: Iterable[str]) -> dict[str, ObjectInfo]:
        """Look keys up; missing ones are left out."""
        ...

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects; missing ones are no error."""
        ...


def content_size(content: Content) -> int:
    """Bytes that a content has."""
    return content.stat().st_size if isinstance(content, Path) else len(content)
