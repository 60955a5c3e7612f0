"""File trees of repositories: immutable, named by content, with the very ids that git would give them.

A tree lists one folder. A change writes the folders on its path and shares all others, so a commit costs what it
changes, however large the repository.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Iterator
from typing import NamedTuple

from .responses import HubError, no_entry

SCHEMA = """
CREATE TABLE IF NOT EXISTS repo_trees (
    repo INTEGER NOT NULL REFERENCES repos (key) ON DELETE CASCADE, id TEXT NOT NULL, entries TEXT NOT NULL,
    PRIMARY KEY (repo, id)
) WITHOUT ROWID;
"""

MAX_PATH_BYTES = 1024
MAX_DEPTH = 64
EMPTY_TREE = "4b825dc642cb6eb9a060e54bf8d69288fbee4904"


class FileEntry(NamedTuple):
    """A file. `oid`: the git id of the file, or of its pointer when `lfs`; `xet`: its hash in xet storage."""

    oid: str
    size: int
    sha256: str
    lfs: bool
    xet: str | None

    @property
    def etag(self) -> str:
        """What names the content towards clients: sha256 for LFS files, else the git id."""
        return self.sha256 if self.lfs else self.oid


class FolderEntry(NamedTuple):
    """A folder, by the id of its tree."""

    oid: str


Entry = FileEntry | FolderEntry
Folder = dict[str, Entry]
_Open = dict[str, "FileEntry | FolderEntry | _Open"]


def git_id(kind: str, body: bytes) -> str:
    """The id that git gives an object of this kind (blob, tree, commit)."""
    return hashlib.sha1(f"{kind} {len(body)}\0".encode() + body, usedforsecurity=False).hexdigest()


def pointer(sha256: str, size: int) -> bytes:
    """The small text that stands in git for a file kept elsewhere."""
    return f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {size}\n".encode()


def check_path(path: object) -> str:
    """`path` if it can be the path of a file in a repository; raises HubError 400."""
    if not isinstance(path, str) or not path:
        raise HubError(400, "the path is empty or not a text")
    try:
        length = len(path.encode())
    except UnicodeEncodeError:
        raise HubError(400, "the path is not valid Unicode") from None
    parts = path.split("/")
    if length > MAX_PATH_BYTES or len(parts) > MAX_DEPTH or any(len(part.encode()) > 255 for part in parts):
        raise HubError(
            400, f"the path has {length} bytes in {len(parts)} parts; at most {MAX_PATH_BYTES} in {MAX_DEPTH}, 255 each"
        )
    if any(part in ("", ".", "..") or part.lower() == ".git" for part in parts):
        raise HubError(400, f"the path {path!r} is absolute or has an empty part, a '.', a '..' or a '.git'")
    if any(ord(c) < 32 or ord(c) == 127 for c in path):
        raise HubError(400, f"the path {path!r} has a control character")
    return path


class Trees:
    """The trees of one repository, read within one database snapshot or transaction. What was read is kept."""

    def __init__(self, connection: sqlite3.Connection, repo: int) -> None:
        self._connection = connection
        self._repo = repo
        self._read: dict[str, Folder] = {EMPTY_TREE: {}}

    def load(self, oid: str) -> Folder:
        """What a folder holds, by name, in git's order. Do not change the answer."""
        if oid not in self._read:
            sql = "SELECT entries FROM repo_trees WHERE repo = ? AND id = ?"
            row = self._connection.execute(sql, (self._repo, oid)).fetchone()
            assert row is not None, "a tree names one that was not stored"
            self._read[oid] = {name: _entry(values) for name, values in json.loads(row[0]).items()}
        return self._read[oid]

    def find(self, root: str, path: str) -> Entry | None:
        """What is at `path` ("" is the root itself), or None."""
        entry: Entry = FolderEntry(root)
        for part in path.split("/") if path else []:
            if not isinstance(entry, FolderEntry) or part not in (folder := self.load(entry.oid)):
                return None
            entry = folder[part]
        return entry

    def walk(
        self, root: str, path: str = "", *, recursive: bool = True, after: str = ""
    ) -> Iterator[tuple[str, Entry]]:
        """All entries below the folder `path`, each folder before what it holds, from the one after the path `after`.

        Raises HubError 404 (EntryNotFound) when `path` is no folder.
        """
        start = self.find(root, path)
        if not isinstance(start, FolderEntry):
            raise no_entry(path)
        yield from self._walk(start.oid, f"{path}/" if path else "", recursive, after.split("/") if after else [])

    def files(self, root: str) -> Iterator[tuple[str, FileEntry]]:
        """All files with their paths."""
        return ((path, entry) for path, entry in self.walk(root) if isinstance(entry, FileEntry))

    def changed(self, old: str, new: str, prefix: str = "") -> Iterator[str]:
        """The paths of files and folders that differ between two trees, cheap where they share folders."""
        if old == new:
            return
        before, now = self.load(old), self.load(new)
        for name in before.keys() | now.keys():
            a, b = before.get(name), now.get(name)
            if a == b:
                continue
            yield prefix + name
            inside = (e.oid if isinstance(e, FolderEntry) else EMPTY_TREE for e in (a, b))
            yield from self.changed(next(inside), next(inside), prefix=f"{prefix}{name}/")

    def store(self, folder: Folder) -> str:
        """Keep a folder; returns its id."""
        body = b"".join(
            f"{'40000' if isinstance(entry, FolderEntry) else '100644'} {name}\0".encode() + bytes.fromhex(entry.oid)
            for name, entry in folder.items()
        )
        oid = git_id("tree", body)
        if folder:
            sql = "INSERT OR IGNORE INTO repo_trees VALUES (?, ?, ?)"
            self._connection.execute(sql, (self._repo, oid, json.dumps(folder, separators=(",", ":"))))
        return oid

    def _walk(self, oid: str, prefix: str, recursive: bool, after: list[str]) -> Iterator[tuple[str, Entry]]:  # noqa: FBT001
        for name, entry in sorted(self.load(oid).items()):
            path = prefix + name
            parts = path.split("/")
            if parts > after:
                yield path, entry
            is_ahead = parts > after or after[: len(parts)] == parts
            if recursive and is_ahead and isinstance(entry, FolderEntry):
                yield from self._walk(entry.oid, f"{path}/", recursive, after)


class Editor:
    """Changes to a tree, in memory until `save`. Paths must have passed `check_path`."""

    def __init__(self, trees: Trees, root: str) -> None:
        self._trees = trees
        self._root = self._open(FolderEntry(root))

    def put(self, path: str, entry: FileEntry) -> None:
        """Add or replace a file. Raises HubError 400 where a file would have to be a folder too, or the reverse."""
        *folders, name = path.split("/")
        at = self._root
        for part in folders:
            below = at.get(part, {})
            if isinstance(below, FileEntry):
                raise HubError(400, f"{path}: {part} is a file, not a folder; delete it first, or choose another path")
            at[part] = at = self._open(below)
        if name in at and not isinstance(at[name], FileEntry):
            raise HubError(400, f"{path} is a folder; delete it first, or choose another path")
        at[name] = entry

    def remove_file(self, path: str) -> None:
        """Raises HubError 404 (EntryNotFound) when there is no such file."""
        at, name = self._parent(path)
        if at is None or not isinstance(at.get(name), FileEntry):
            raise HubError(404, f"A file with this name doesn't exist: {path}", "EntryNotFound")
        del at[name]

    def remove_folder(self, path: str) -> None:
        """Raises HubError 404 (EntryNotFound) when there is no such folder."""
        at, name = self._parent(path)
        if at is None or name not in at or isinstance(at[name], FileEntry):
            raise HubError(404, f"A folder with this name doesn't exist: {path}", "EntryNotFound")
        del at[name]

    def save(self) -> str:
        """Store what changed and return the id of the root. Empty folders vanish, as in git."""
        return self._save(self._root)

    def _parent(self, path: str) -> tuple[_Open | None, str]:
        *folders, name = path.split("/")
        at = self._root
        for part in folders:
            below = at.get(part)
            if below is None or isinstance(below, FileEntry):
                return None, name
            at[part] = at = self._open(below)
        return at, name

    def _open(self, folder: FolderEntry | _Open) -> _Open:
        return folder if isinstance(folder, dict) else {**self._trees.load(folder.oid)}

    def _save(self, folder: _Open) -> str:
        done: Folder = {}
        for name, entry in folder.items():
            kept = FolderEntry(self._save(entry)) if isinstance(entry, dict) else entry
            if kept != FolderEntry(EMPTY_TREE):
                done[name] = kept
        order = sorted(done, key=lambda name: (name + "/" * isinstance(done[name], FolderEntry)).encode())
        return self._trees.store({name: done[name] for name in order})


def _entry(values: list[str | int | None]) -> Entry:
    if len(values) == 1:
        return FolderEntry(str(values[0]))
    oid, size, sha256, lfs, xet = values
    return FileEntry(str(oid), int(size or 0), str(sha256), bool(lfs), None if xet is None else str(xet))
