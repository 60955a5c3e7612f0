"""Read objects and believe nothing: sizes, hashes and checks are compared before anything is used."""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from . import layout
from .canonical import sha256_hex
from .errors import CorruptObject, ObjectMissing
from .schema.wire import Manifest, ObjectEntry, Ref, parse
from .stores.base import Store

IN_MEMORY = 1 << 20
"""Larger objects go through a file."""


def checked_bytes(store: Store, key: str, size: int, sha256: str) -> bytes:
    """Return an object that has exactly this size and sha256; raises CorruptObject naming it otherwise."""
    try:
        data = store.get(key, limit=size)
    except ObjectMissing:
        raise CorruptObject(f"{key}: named by the head or a manifest, but missing from {store.url}") from None
    if len(data) != size or sha256_hex(data) != sha256:
        raise CorruptObject(
            f"{key}: {len(data)} bytes with sha256 {sha256_hex(data)[:12]}…, expected {size} bytes with "
            f"{sha256[:12]}…; the object was altered or cut short"
        )
    return data


def read_manifest(store: Store, ref: Ref) -> Manifest:
    """Read the manifest that `ref` names; raises CorruptObject when it is not that version's."""
    manifest = parse(Manifest, checked_bytes(store, ref.key, ref.size, ref.sha256), ref.key)
    check_manifest(manifest, ref)
    return manifest


def check_manifest(manifest: Manifest, ref: Ref) -> None:
    """Raise CorruptObject unless a manifest says what the reference to it says."""
    said = (manifest.kind, manifest.identity, manifest.base_digest, manifest.state_digest, manifest.payload_bytes)
    expected = (ref.kind, ref.identity, ref.base_digest, ref.state_digest, ref.payload)
    if said != expected:
        raise CorruptObject(f"{ref.key}: the manifest says {said}, the reference to it {expected}")


def read_object(store: Store, ref: Ref, manifest: Manifest, name: str) -> bytes:
    """Read one object of a version by name."""
    entry = _entry(manifest, name, ref.key)
    return checked_bytes(store, layout.folder_of(ref.key) + name, entry.size, entry.sha256)


@contextmanager
def object_bytes(store: Store, key: str, size: int, sha256: str, scratch: Path) -> Iterator[bytes | mmap.mmap]:
    """The bytes of an object, checked; a large one lies in `scratch` and is mapped. Raises CorruptObject."""
    if size <= IN_MEMORY:
        yield checked_bytes(store, key, size, sha256)
        return
    path = scratch / "object"
    _checked_file(store, key, size, sha256, path)
    with path.open("rb") as file:
        yield mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _checked_file(store: Store, key: str, size: int, sha256: str, path: Path) -> None:
    try:
        store.fetch(key, path, limit=size)
    except ObjectMissing:
        raise CorruptObject(f"{key}: named by its manifest, but missing from {store.url}") from None
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if path.stat().st_size != size or found != sha256:
        raise CorruptObject(f"{key}: sha256 {found[:12]}…, expected {sha256[:12]}…; the object was altered")


def download(store: Store, ref: Ref, manifest: Manifest, folder: Path) -> None:
    """Download every object of an anchor into `folder`, each checked in place; raises CorruptObject."""
    for entry in manifest.objects:
        key = layout.folder_of(ref.key) + entry.name
        _checked_file(store, key, entry.size, entry.sha256, folder / entry.name)


def _entry(manifest: Manifest, name: str, key: str) -> ObjectEntry:
    for entry in manifest.objects:
        if entry.name == name:
            return entry
    raise CorruptObject(f"{key}: names no object {name!r}; it has {[e.name for e in manifest.objects]}")
