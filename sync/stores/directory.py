"""A store in a folder: the whole product on one machine, or on any shared or synced file system."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from ..errors import ConfigError, CorruptObject, ObjectMissing, StoreUnavailable
from ..layout import check_key, is_key_part
from .base import Content, ObjectInfo

_PART = ".part-"
_PARTS = ".parts"
_STALE = 86_400.0


class DirectoryStore:
    """Objects are files. A write goes to a temporary name, is synced to disk, and is renamed: never half visible.

    Raises ConfigError at construction when the folder is missing (unless `create`), is not a folder, or cannot be
    read; and when `writable` is set and it cannot be written.
    """

    def __init__(self, root: Path, *, create: bool = False, writable: bool = False) -> None:
        self.url = f"file://{root.absolute()}"
        self.lag = 0.0
        self._root = root
        try:
            if create:
                root.mkdir(parents=True, exist_ok=True)
            if not root.exists():
                raise ConfigError(f"{self.url}: no such bucket folder; start the trainer first, or create it")
            os.scandir(root).close()
            if writable or create:
                (root / _PARTS).mkdir(exist_ok=True)
                probe = root / _PARTS / secrets.token_hex(8)
                probe.write_bytes(b"")
                now = probe.stat().st_mtime
                probe.unlink()
                for left in (root / _PARTS).iterdir():  # what a killed writer left, among what others write now
                    with suppress(FileNotFoundError, PermissionError):
                        if left.stat().st_mtime < now - _STALE:
                            left.unlink()
        except OSError as error:
            raise ConfigError(
                f"{self.url}: cannot be used as a bucket ({error.strerror}); choose a folder that this user may "
                f"{'write' if writable or create else 'read'}"
            ) from None

    def _path(self, key: str) -> Path:
        return self._root / check_key(key)

    def put_batch(self, objects: Mapping[str, Content]) -> None:
        """See Store."""
        with self._available("write"):
            for key, content in objects.items():
                path = self._path(key)
                path.parent.mkdir(parents=True, exist_ok=True)
                self._write(content, path)
            for folder in {self._path(key).parent for key in objects}:
                _sync_folder(folder)

    def _write(self, content: Content, path: Path) -> None:
        parts = self._root / _PARTS
        parts.mkdir(exist_ok=True)
        part = parts / secrets.token_hex(8)
        try:
            with part.open("wb") as file:
                if isinstance(content, Path):
                    with content.open("rb") as source:
                        shutil.copyfileobj(source, file, 1 << 20)
                else:
                    file.write(content)
                file.flush()
                os.fsync(file.fileno())
            part.replace(path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise

    def get(self, key: str, *, limit: int) -> bytes:
        """See Store."""
        with self._available("read"), self._open(key, limit) as file:
            return _read_all(file)

    def fetch(self, key: str, path: Path, *, limit: int) -> None:
        """See Store."""
        part = path.with_name(f"{_PART}{secrets.token_hex(8)}")
        with self._available("read"), self._open(key, limit) as file:
            try:
                with os.fdopen(os.dup(file), "rb") as source, part.open("wb") as target:
                    shutil.copyfileobj(source, target)
                part.replace(path)
            except BaseException:
                part.unlink(missing_ok=True)
                raise

    @contextmanager
    def _open(self, key: str, limit: int) -> Iterator[int]:
        try:
            file = os.open(self._path(key), os.O_RDONLY | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            raise ObjectMissing(f"{self.url} {key}: no such object") from None
        try:
            found = os.fstat(file)
            if not stat.S_ISREG(found.st_mode):
                raise ObjectMissing(f"{self.url} {key}: no such object (a folder has that name)")
            if found.st_size > limit:
                raise CorruptObject(f"{key}: {found.st_size} bytes, expected at most {limit}")
            yield file
        finally:
            os.close(file)

    def list(self, prefix: str) -> list[ObjectInfo]:
        """See Store."""
        folder = self._root / prefix[: prefix.rindex("/") + 1] if "/" in prefix else self._root
        with self._available("list"):
            found = [self._stat(path) for path in _files(folder)]
        return sorted(i for i in found if i is not None and i.key.startswith(prefix))

    def info(self, keys: Iterable[str]) -> dict[str, ObjectInfo]:
        """See Store."""
        with self._available("look up"):
            found = [self._stat(self._path(key)) for key in keys]
        return {i.key: i for i in found if i is not None}

    def _stat(self, path: Path) -> ObjectInfo | None:
        try:
            found = path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return None  # deleted between listing and stat, or never there
        if not stat.S_ISREG(found.st_mode):
            return None
        key = path.relative_to(self._root).as_posix()
        return ObjectInfo(key, found.st_size, found.st_mtime, f"{found.st_mtime_ns:x}-{found.st_ino:x}")

    def delete(self, keys: Iterable[str]) -> None:
        """See Store."""
        with self._available("delete"):
            for key in keys:
                with suppress(FileNotFoundError, NotADirectoryError):
                    self._path(key).unlink()

    @contextmanager
    def _available(self, what: str) -> Iterator[None]:
        try:
            yield
        except PermissionError as error:
            raise ConfigError(f"{self.url}: no permission to {what} {error.filename}") from None
        except OSError as error:
            if error.errno == errno.EROFS:
                raise ConfigError(f"{self.url}: cannot {what} ({error.strerror})") from None
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            if full and what == "read":
                raise  # the bucket was only read: it is the disk of the copy
            hint = "; free some space" if full else ""
            raise StoreUnavailable(f"{self.url}: cannot {what} ({error.strerror or error}){hint}") from None


def _files(folder: Path) -> Iterator[Path]:
    """Every file below a folder whose path may be a key. One that may not be read is an error, not an empty folder."""

    def stop(error: OSError) -> None:
        if not isinstance(error, (FileNotFoundError, NotADirectoryError)):
            raise error

    for at, folders, names in os.walk(folder, onerror=stop):
        folders[:] = [name for name in folders if is_key_part(name)]
        yield from (Path(at, name) for name in names if is_key_part(name))


def _read_all(file: int) -> bytes:
    with os.fdopen(os.dup(file), "rb") as source:
        return source.read()


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
