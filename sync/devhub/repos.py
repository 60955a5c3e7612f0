"""Repositories of models, datasets and Spaces as they are kept: commits that never change, branches and tags on them.

A commit is a tree and its parent, with the id that git would give it. Every change is one transaction and is on disk
before the call returns; file contents are published before the commit that names them.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from . import repo_trees
from .database import Database
from .repo_trees import EMPTY_TREE, Editor, FileEntry, Trees, git_id
from .responses import HubError, not_found, now_ms

SCHEMA = (
    """
CREATE TABLE IF NOT EXISTS repos (
    key INTEGER PRIMARY KEY AUTOINCREMENT, type TEXT NOT NULL, namespace TEXT NOT NULL, name TEXT NOT NULL,
    private INTEGER NOT NULL, created INTEGER NOT NULL, updated INTEGER NOT NULL, UNIQUE (type, namespace, name)
);
CREATE TABLE IF NOT EXISTS repo_commits (
    repo INTEGER NOT NULL REFERENCES repos (key) ON DELETE CASCADE, sha TEXT NOT NULL, tree TEXT NOT NULL,
    parent TEXT, author TEXT NOT NULL, title TEXT NOT NULL, message TEXT NOT NULL, at INTEGER NOT NULL,
    PRIMARY KEY (repo, sha)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS repo_refs (
    repo INTEGER NOT NULL REFERENCES repos (key) ON DELETE CASCADE, kind TEXT NOT NULL, name TEXT NOT NULL,
    sha TEXT NOT NULL, message TEXT NOT NULL DEFAULT '', PRIMARY KEY (repo, kind, name)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS repo_lfs (
    repo INTEGER NOT NULL REFERENCES repos (key) ON DELETE CASCADE, sha256 TEXT NOT NULL, PRIMARY KEY (repo, sha256)
) WITHOUT ROWID;
"""
    + repo_trees.SCHEMA
)

LookUp = Callable[[str, str | None], FileEntry | None]
"""(path, revision) → the file there; without a revision in the commit that is being changed."""

TYPES = ("model", "dataset", "space")
MAIN = "main"
_NAME = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_])?")
_TAKEN = {"api", "buckets", "cdn", "datasets", "kernels", "lfs", "models", "spaces", "xet"}
_SHA = re.compile(r"[0-9a-f]{40}")
_SHORT_SHA = re.compile(r"[0-9a-f]{7,39}")
_REF = re.compile(r"(?!.*(?:\.\.|//|@\{|\.lock(?:/|$)))(?![/.-])[A-Za-z0-9._/+@=#-]{1,200}(?<![/.])")
_REPO = "SELECT key, type, namespace, name, private, created, updated FROM repos "
_COMMIT = "SELECT sha, tree, parent, author, title, message, at FROM repo_commits WHERE repo = ? "


class Repo(NamedTuple):
    """A repository as it is listed. Times in milliseconds since 1970; `updated`: the last commit on main."""

    key: int
    type: str
    namespace: str
    name: str
    private: bool
    created: int
    updated: int

    @property
    def id(self) -> str:
        """namespace/name."""
        return f"{self.namespace}/{self.name}"

    @property
    def path(self) -> str:
        """Where its pages and files are below the endpoint: `a/b`, `datasets/a/b`, `spaces/a/b`."""
        return self.id if self.type == "model" else f"{self.type}s/{self.id}"


class Commit(NamedTuple):
    """A commit. `at`: milliseconds since 1970."""

    sha: str
    tree: str
    parent: str | None
    author: str
    title: str
    message: str
    at: int


class Ref(NamedTuple):
    """A branch or a tag."""

    kind: str
    name: str
    sha: str


class View:
    """One repository at one moment: its refs, commits and trees, within a database snapshot or transaction."""

    def __init__(self, connection: sqlite3.Connection, repo: Repo) -> None:
        self.connection = connection
        self.repo = repo
        self.trees = Trees(connection, repo.key)

    def commit(self, revision: str = MAIN) -> Commit:
        """The commit that a branch, a tag, an id or the first 7 or more digits of an id name.

        Raises HubError 404 (RevisionNotFound).
        """
        for ref in self.refs():
            kept = {"branch": f"refs/heads/{ref.name}", "tag": f"refs/tags/{ref.name}"}[ref.kind]
            if revision in (ref.name, kept):
                return self._load(ref.sha)
        if _SHA.fullmatch(revision):
            row = self.connection.execute(_COMMIT + "AND sha = ?", (self.repo.key, revision)).fetchone()
            if row is not None:
                return Commit(*row)
        elif _SHORT_SHA.fullmatch(revision):
            values = (self.repo.key, revision, revision + "g")
            rows = self.connection.execute(_COMMIT + "AND sha >= ? AND sha < ? LIMIT 2", values).fetchall()
            if len(rows) == 1:
                return Commit(*rows[0])
        raise no_revision(revision)

    def refs(self) -> list[Ref]:
        """Branches, then tags, by name."""
        sql = "SELECT kind, name, sha FROM repo_refs WHERE repo = ? ORDER BY kind, name"
        return [Ref(*row) for row in self.connection.execute(sql, (self.repo.key,))]

    def history(self, commit: Commit) -> Iterator[Commit]:
        """`commit` and all before it, newest first."""
        yield commit
        while commit.parent is not None:
            commit = self._load(commit.parent)
            yield commit

    def last_commits(self, commit: Commit, paths: Iterable[str]) -> dict[str, Commit]:
        """For each path that exists in `commit`, the newest commit up to it that changed what is there."""
        missing, found = set(paths), dict[str, Commit]()
        for at in self.history(commit):
            if not missing:
                break
            before = self._load(at.parent).tree if at.parent else EMPTY_TREE
            for path in missing.intersection(self.trees.changed(before, at.tree)):
                found[path] = at
            missing -= found.keys()
        return found

    def look_up(self, head: Commit) -> LookUp:
        """Finds files at other revisions, by default in `head`."""

        def find(path: str, revision: str | None) -> FileEntry | None:
            tree = head.tree if revision is None else self.commit(revision).tree
            entry = self.trees.find(tree, path)
            return entry if isinstance(entry, FileEntry) else None

        return find

    def owns_lfs(self, sha256: str) -> bool:
        """Whether any commit here ever held this LFS file."""
        sql = "SELECT 1 FROM repo_lfs WHERE repo = ? AND sha256 = ?"
        return self.connection.execute(sql, (self.repo.key, sha256)).fetchone() is not None

    def _load(self, sha: str) -> Commit:
        return Commit(*self.connection.execute(_COMMIT + "AND sha = ?", (self.repo.key, sha)).fetchone())


class Message(NamedTuple):
    """What a commit says about itself."""

    author: str
    title: str
    text: str = ""


class Repos:
    """All repositories of a Hub. Thread-safe; has no state besides the database."""

    def __init__(self, db: Database) -> None:
        self._db = db

    def create(
        self, kind: str, namespace: str, name: str, *, private: bool, message: Message,
        change: Callable[[Editor], None], also: Callable[[sqlite3.Connection, int], None] | None = None,
    ) -> bool:  # fmt: skip
        """Create a repository whose first commit is what `change` makes of an empty tree; False: it exists already.

        `also` gets the connection and the new key within the same transaction. Raises HubError 400 for a bad name.
        """
        check_id(namespace, name)
        now = now_ms()
        with self._db.write() as connection:
            sql = "INSERT OR IGNORE INTO repos (type, namespace, name, private, created, updated) VALUES (?,?,?,?,?,?)"
            made = connection.execute(sql, (kind, namespace, name, private, now, now))
            if made.rowcount != 1:
                return False
            repo = _find(connection, kind, namespace, name)
            trees = Trees(connection, repo.key)
            editor = Editor(trees, EMPTY_TREE)
            change(editor)
            sha = _add_commit(connection, repo.key, editor.save(), None, message, now)
            connection.execute("INSERT INTO repo_refs VALUES (?, 'branch', ?, ?, '')", (repo.key, MAIN, sha))
            if also is not None:
                also(connection, repo.key)
        return True

    def find(self, kind: str, namespace: str, name: str) -> Repo:
        """The repository; raises HubError 404 (RepoNotFound)."""
        return _find(self._db.read(), kind, namespace, name)

    def listed(self, kind: str, *, namespace: str | None = None, search: str = "") -> Iterator[Repo]:
        """Repositories of a type in the order of their ids; `search` is looked for in the ids, whatever the case."""
        sql = _REPO + "WHERE type = ? AND instr(lower(namespace || '/' || name), ?) > 0"
        values = [kind, search.lower()]
        if namespace is not None:
            sql += " AND namespace = ?"
            values.append(namespace)
        rows = self._db.read().execute(sql + " ORDER BY namespace || '/' || name", values).fetchall()
        return map(_repo, rows)

    def delete(self, repo: Repo) -> None:
        """Delete a repository with its history. Contents that nothing names any more stay on disk."""
        with self._db.write() as connection:
            connection.execute("DELETE FROM repos WHERE key = ?", (repo.key,))

    def set_private(self, repo: Repo, *, private: bool) -> None:
        """Change who sees a repository."""
        with self._db.write() as connection:
            connection.execute("UPDATE repos SET private = ? WHERE key = ?", (private, repo.key))

    def move(self, repo: Repo, namespace: str, name: str) -> None:
        """Rename a repository; raises HubError 400 for a bad name and 409 when the new one is taken."""
        check_id(namespace, name)
        with self._db.write() as connection:
            try:
                sql = "UPDATE repos SET namespace = ?, name = ? WHERE key = ?"
                connection.execute(sql, (namespace, name, repo.key))
            except sqlite3.IntegrityError:
                raise HubError(409, f"the {repo.type} {namespace}/{name} exists already; choose another name") from None

    @contextmanager
    def view(self, repo: Repo) -> Iterator[View]:
        """Look at a repository; everything read in the block is from one moment."""
        with self._db.snapshot() as connection:
            yield View(connection, repo)

    def commit(
        self, repo: Repo, branch: str, message: Message, change: Callable[[Editor, LookUp], None], *,
        parent: str | None = None, lfs: Iterable[str] = (), also: Callable[[sqlite3.Connection, Trees, str], None],
    ) -> Commit:  # fmt: skip
        """Add a commit with what `change` makes of the branch; `lfs`: the sha256 of the LFS files it brings.

        `also` gets the connection, the trees and the new root within the transaction, for a commit on main. Raises
        HubError 404 when there is no such branch, 412 when its newest commit is not `parent` (unless None), and what
        `change` raises; nothing has changed then.
        """
        branch = branch.removeprefix("refs/heads/")
        with self._db.write() as connection:
            repo = _find_key(connection, repo)
            view = View(connection, repo)
            head = _head(view, branch)
            if parent is not None and parent != head.sha:
                raise HubError(412, f"{branch} is at {head.sha}, not at the parent commit {parent}; look and try again")
            editor = Editor(view.trees, head.tree)
            change(editor, view.look_up(head))
            at = max(now_ms(), head.at + 1)
            root = editor.save()
            sha = _add_commit(connection, repo.key, root, head.sha, message, at)
            sql = "UPDATE repo_refs SET sha = ? WHERE repo = ? AND kind = 'branch' AND name = ?"
            connection.execute(sql, (sha, repo.key, branch))
            rows = ((repo.key, sha256) for sha256 in lfs)
            connection.executemany("INSERT OR IGNORE INTO repo_lfs VALUES (?, ?)", rows)
            if branch == MAIN:
                connection.execute("UPDATE repos SET updated = ? WHERE key = ?", (at, repo.key))
                also(connection, view.trees, root)
            return Commit(sha, root, head.sha, message.author, message.title, message.text, at)

    def create_ref(self, repo: Repo, kind: str, name: str, revision: str, message: str = "") -> None:
        """Add a branch or a tag at `revision`. Raises HubError 400 for a bad name, 404, and 409 when it exists."""
        if not _REF.fullmatch(name) or _SHA.fullmatch(name) or name.startswith("refs/"):
            raise HubError(400, f"{name!r} cannot be the name of a {kind}: letters, digits and ._/+@=#- only")
        with self._db.write() as connection:
            sha = View(connection, _find_key(connection, repo)).commit(revision).sha
            sql = "INSERT OR IGNORE INTO repo_refs VALUES (?, ?, ?, ?, ?)"
            if connection.execute(sql, (repo.key, kind, name, sha, message)).rowcount != 1:
                raise HubError(409, f"Reference already exists: the {kind} {name}")

    def delete_ref(self, repo: Repo, kind: str, name: str) -> None:
        """Delete a branch or a tag. Raises HubError 403 for main and 404 (RevisionNotFound)."""
        if (kind, name) == ("branch", MAIN):
            raise HubError(403, f"the branch {MAIN} cannot be deleted")
        with self._db.write() as connection:
            sql = "DELETE FROM repo_refs WHERE repo = ? AND kind = ? AND name = ?"
            if connection.execute(sql, (repo.key, kind, name)).rowcount != 1:
                raise no_revision(name)

    def squash(self, repo: Repo, branch: str, message: Message) -> None:
        """Replace the history of a branch by one commit with its present files. Raises HubError 404."""
        with self._db.write() as connection:
            head = _head(View(connection, _find_key(connection, repo)), branch)
            sha = _add_commit(connection, repo.key, head.tree, None, message, now_ms())
            sql = "UPDATE repo_refs SET sha = ? WHERE repo = ? AND kind = 'branch' AND name = ?"
            connection.execute(sql, (sha, repo.key, branch))


def check_id(namespace: str, name: str) -> None:
    """Raise HubError 400 unless both can be parts of a repository id."""
    for part in (namespace, name):
        bad = "--" in part or ".." in part or part.endswith((".git", ".ipynb"))
        if bad or not _NAME.fullmatch(part):
            raise HubError(
                400, f"{namespace}/{name} is no repository id: up to 96 letters, digits, '.', '_' and '-' in each part"
            )
    if namespace.lower() in _TAKEN:
        raise HubError(400, f"the namespace {namespace} is reserved; choose another")


def no_revision(revision: str) -> HubError:
    """404 for a branch, tag or commit that is not there."""
    return HubError(404, f"Invalid rev id: {revision}", "RevisionNotFound")


def _head(view: View, branch: str) -> Commit:
    if not any(ref.kind == "branch" and ref.name == branch for ref in view.refs()):
        raise no_revision(branch)
    return view.commit(f"refs/heads/{branch}")


def _add_commit(
    connection: sqlite3.Connection, repo: int, tree: str, parent: str | None, message: Message, at: int
) -> str:
    who = f"{message.author} <{message.author}@localhost> {at // 1000} +0000"
    lines = [f"tree {tree}", *([f"parent {parent}"] if parent else []), f"author {who}", f"committer {who}"]
    text = f"{message.title}\n\n{message.text}" if message.text else message.title
    sha = git_id("commit", ("\n".join(lines) + f"\n\n{text}\n").encode())
    sql = "INSERT OR IGNORE INTO repo_commits VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
    connection.execute(sql, (repo, sha, tree, parent, message.author, message.title, message.text, at))
    return sha


def _find(connection: sqlite3.Connection, kind: str, namespace: str, name: str) -> Repo:
    sql = _REPO + "WHERE type = ? AND namespace = ? AND name = ?"
    row = connection.execute(sql, (kind, namespace, name)).fetchone()
    if row is None:
        raise not_found(f"The {kind} {namespace}/{name}")
    return _repo(row)


def _find_key(connection: sqlite3.Connection, repo: Repo) -> Repo:
    row = connection.execute(_REPO + "WHERE key = ?", (repo.key,)).fetchone()
    if row is None:
        raise not_found(f"The {repo.type} {repo.id}")
    return _repo(row)


def _repo(row: tuple[int, str, str, str, int, int, int]) -> Repo:
    return Repo(*row[:4], bool(row[4]), *row[5:])
