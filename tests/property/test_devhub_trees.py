"""Trees of repositories against a plain dictionary of paths."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("starlette", reason="needs the extra `hub`")

from sync.devhub.repo_trees import EMPTY_TREE, Editor, FileEntry, FolderEntry, Trees, git_id
from sync.devhub.repos import SCHEMA
from sync.devhub.responses import HubError

pytestmark = pytest.mark.property

PATHS = st.lists(st.sampled_from(["a", "a.b", "a-b", "a0", "B", "ä"]), min_size=1, max_size=4).map("/".join)
CHANGES = st.lists(st.tuples(st.sampled_from(["put", "file", "folder"]), PATHS, st.integers(0, 3)), max_size=25)
Files = dict[str, FileEntry]


@contextmanager
def trees() -> Iterator[Trees]:
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.executescript(SCHEMA)
        yield Trees(connection, 1)


def entry(number: int) -> FileEntry:
    data = bytes([number])
    return FileEntry(git_id("blob", data), 1, f"{number:064x}", lfs=bool(number % 2), xet=None)


def inside(path: str, folder: str) -> bool:
    return path.startswith(folder + "/")


def step(files: Files, change: tuple[str, str, int]) -> Files | None:
    """What a change makes of the files; None: it must be refused."""
    kind, path, number = change
    folder = {p for p in files if inside(p, path)}
    if kind == "put":
        return None if folder or any(inside(path, p) for p in files) else {**files, path: entry(number)}
    gone = {path} & files.keys() if kind == "file" else folder
    return {p: e for p, e in files.items() if p not in gone} if gone else None


def apply(editor: Editor, change: tuple[str, str, int]) -> None:
    kind, path, number = change
    if kind == "put":
        editor.put(path, entry(number))
    elif kind == "file":
        editor.remove_file(path)
    else:
        editor.remove_folder(path)


def folders(files: Files) -> set[str]:
    return {path[:n] for path in files for n, c in enumerate(path) if c == "/"}


@settings(deadline=None)
@given(CHANGES)
def test_a_tree_is_what_its_changes_made(changes: list[tuple[str, str, int]]) -> None:
    with trees() as kept:
        files: Files = {}
        root = EMPTY_TREE
        for change in changes:
            after = step(files, change)
            editor = Editor(kept, root)
            if after is None:
                with pytest.raises(HubError):
                    apply(editor, change)
                continue
            apply(editor, change)
            root, files = editor.save(), after
        assert dict(kept.files(root)) == files
        fresh = Editor(kept, EMPTY_TREE)
        for path in sorted(files, reverse=True):
            fresh.put(path, files[path])
        assert fresh.save() == root, "a tree is named by what it holds, not by how it came about"


@settings(deadline=None)
@given(st.dictionaries(PATHS, st.integers(0, 3)), st.dictionaries(PATHS, st.integers(0, 3)))
def test_walks_can_stop_anywhere_and_differences_are_complete(old: dict[str, int], new: dict[str, int]) -> None:
    with trees() as kept:
        roots, models = [], []
        for wanted in (old, new):
            files: Files = {}
            editor = Editor(kept, EMPTY_TREE)
            for path, number in wanted.items():
                after = step(files, ("put", path, number))
                if after is not None:
                    apply(editor, ("put", path, number))
                    files = after
            roots.append(editor.save())
            models.append(files)
        walk = list(kept.walk(roots[0]))
        assert {path for path, e in walk if isinstance(e, FolderEntry)} == folders(models[0])
        assert {path for path, e in walk if isinstance(e, FileEntry)} == models[0].keys()
        for n, (path, _) in enumerate(walk):
            assert list(kept.walk(roots[0], after=path)) == walk[n + 1 :]
            assert kept.find(roots[0], path) == walk[n][1]
        everything = dict(walk) | dict(kept.walk(roots[1]))
        changed = {path for path in everything if kept.find(roots[0], path) != kept.find(roots[1], path)}
        assert set(kept.changed(*roots)) == changed
