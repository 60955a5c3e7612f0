"""`deltawire checkout`: one version as an ordinary checkpoint folder."""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..digest import state_sums
from ..errors import ConfigError, CorruptObject, InvalidRequest
from ..events import emitter
from ..replica import Replica
from ..safetensors_io import MappedCheckpoint
from ..schema.wire import Head, Ref
from ..stores.base import Store
from . import common
from .scratch import Scratch


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    common.add_common(parser, channel=common.WEIGHTS)
    parser.add_argument("version", metavar="VERSION", help="a live version as 12 or 12@2, or head")
    parser.add_argument("dir", type=Path, metavar="DIR", help="folder to make; it must not exist, or be empty")


def run(args: argparse.Namespace) -> int:
    """Write the folder; returns 0."""
    result = checkout(common.open_run(args), args.version, args.dir, args.channel)
    text = f"{result['version']}  {result['digest']}  {common.plural(result['files'], 'file')}, "
    common.show(args, result, [f"{text}{common.size(result['bytes'])} in {result['dir']}"])
    return 0


def checkout(store: Store, version: str, folder: Path, channel: str = common.WEIGHTS) -> common.Result:
    """Write a live version's weights and the files beside them, as its anchor has them; whole, or not at all.

    Returns {url, channel, version, digest, dir, files, bytes}; the digest was recomputed from the files written. Raises
    ConfigError when the folder cannot be made, Pruned when the version is not live, CorruptObject when no undamaged
    objects lead there.
    """
    (found,) = common.read_channels(store, channel)
    head, refs = found.head, common.live_refs(store, found.head)
    identity = common.find_version(version, head, refs)
    if head.manifest is not None and head.manifest.kind == "document":
        raise InvalidRequest(f"channel {channel!r} holds documents, not weights; see them with `deltawire show`")
    ref = next(r for r in refs if r.identity == identity)
    if "\0" in str(folder) or len(os.fsencode(folder.name)) > 200:
        raise ConfigError(f"{folder.name[:40]!r}… is no name for a folder: up to 200 bytes, no NUL")
    with _sibling(folder) as part:
        made = bring(store, head, ref, part)
        made.rename(folder)
        _sync(folder.absolute().parent)
    files = [p for p in folder.iterdir() if p.is_file()]
    return {
        "url": store.url, "channel": channel, "version": str(identity), "digest": ref.state_digest,
        "dir": str(folder.absolute()), "files": len(files), "bytes": sum(p.stat().st_size for p in files),
    }  # fmt: skip


def bring(store: Store, head: Head, ref: Ref, folder: Path) -> Path:
    """Write the version that `ref` reaches as a checkpoint folder below `folder`, and return it. Its digest is that of
    the files on the disk."""
    mirror = Scratch(folder / "mirror")
    try:
        Replica(store, mirror, emitter("checkout", "none")).go_to(ref.identity, head)
        made = mirror.checkpoint
        mirror.settle()
    finally:
        mirror.close()
    for path in made.iterdir():
        _sync(path)
    files = MappedCheckpoint(made)
    found = state_sums(files.state, files.schema).text()
    if found != ref.state_digest:
        raise CorruptObject(f"version {ref.identity}: the files written give {found}, declared {ref.state_digest}")
    return made


@contextmanager
def _sibling(folder: Path) -> Iterator[Path]:
    """A temporary folder beside the one that is to be made, gone at the end."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} exists and is not an empty folder; choose a new one")
    try:
        folder.absolute().parent.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(prefix=f".{folder.name}.part-", dir=folder.absolute().parent))
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be made ({error.strerror}); choose another") from None
    try:
        yield part
    except OSError as error:
        raise ConfigError(
            f"{folder}: the disk failed ({error.strerror or error}); free some or choose another"
        ) from None
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
