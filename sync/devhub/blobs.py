"""Contents that are not in xet storage: small files of repositories, and what was uploaded over Git LFS.

One file per content, named by its sha256, written once: to a temporary name, flushed to disk, then renamed. So whatever
has its final name is whole, also after a kill at any point.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

PIECE = 1 << 20
SHA256 = re.compile(r"[0-9a-f]{64}")


class Staged:
    """A content that is being received; nobody reads it before `Blobs.publish`. At the end always call `discard`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: IO[bytes] | None = path.open("xb")
        self._hash = hashlib.sha256()
        self.size = 0

    def write(self, piece: bytes) -> None:
        """Append a piece."""
        assert self._file is not None
        self._file.write(piece)
        self._hash.update(piece)
        self.size += len(piece)

    def seal(self) -> str:
        """Flush everything to disk and return the sha256 in hex. No write after it; a second call does nothing more."""
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._file = None
        return self._hash.hexdigest()

    def discard(self) -> None:
        """Drop whatever was not published."""
        if self._file is not None:
            self._file.close()
            self._file = None
        self.path.unlink(missing_ok=True)


class Blobs:
    """Contents by sha256 below `folder`; unfinished ones are below `tmp`, on the same file system. Thread-safe."""

    def __init__(self, folder: Path, tmp: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        tmp.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._tmp = tmp

    def stage(self) -> Staged:
        """Begin to receive a content."""
        return Staged(self._tmp / f"blob-{secrets.token_hex(8)}")

    def publish(self, contents: Iterable[Staged]) -> None:
        """Make contents readable, each under its sha256. All are on disk when this returns."""
        folders = set()
        for staged in contents:
            final = self._path(staged.seal())
            final.parent.mkdir(exist_ok=True)
            staged.path.replace(final)
            folders.add(final.parent)
        for folder in [*folders, self._folder] if folders else []:
            _sync_folder(folder)

    def size(self, sha256: str) -> int | None:
        """Bytes of a content, None when it is not here."""
        try:
            return self._path(sha256).stat().st_size
        except FileNotFoundError:
            return None

    def read(self, sha256: str, start: int = 0, end: int | None = None) -> Iterator[bytes]:
        """The bytes from `start` to `end` (exclusive) in pieces of at most 1 MiB. Raises FileNotFoundError."""
        with self._path(sha256).open("rb") as file:
            file.seek(start)
            left = None if end is None else end - start
            while piece := file.read(PIECE if left is None else min(PIECE, left)):
                yield piece
                left = None if left is None else left - len(piece)

    def _path(self, sha256: str) -> Path:
        assert SHA256.fullmatch(sha256), "contents are named by 64 hex digits"
        return self._folder / sha256[:2] / sha256


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
