"""What the Hub tells about repositories, as the JSON that its clients read."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .blobs import Blobs
from .repo_cards import card_of
from .repo_trees import Entry, FileEntry, pointer
from .repos import Commit, Repo, View
from .responses import iso

_SAFE = {"status": "unscanned", "avScan": None, "pickleImportScan": None, "jFrogScan": None, "protectAiScan": None}


def listed(view: View, blobs: Blobs) -> dict[str, Any]:
    """A repository as lists show it, at the head of main."""
    head = view.commit()
    return _base(view.repo, head) | _card(card_of(blobs, view.trees, head.tree), full=False)


def info(view: View, blobs: Blobs, commit: Commit, *, with_blobs: bool) -> dict[str, Any]:
    """A repository at a commit with all its files; `with_blobs`: sizes and ids too."""
    files = list(view.trees.files(commit.tree))
    about = _base(view.repo, commit) | _card(card_of(blobs, view.trees, commit.tree), full=True)
    about["siblings"] = [_sibling(path, entry, with_blobs=with_blobs) for path, entry in files]
    about["usedStorage"] = sum(entry.size for _, entry in files)
    return about


def entries(view: View, commit: Commit, found: Iterable[tuple[str, Entry]], *, expand: bool) -> list[dict[str, Any]]:
    """Files and folders as tree and paths-info show them; `expand`: with the commit that last changed each."""
    items = list(found)
    last = view.last_commits(commit, (path for path, _ in items)) if expand else {}
    shown = []
    for path, entry in items:
        item = _entry(path, entry)
        if expand:
            at = last[path]
            item["lastCommit"] = {"id": at.sha, "title": at.title, "date": iso(at.at)}
            if isinstance(entry, FileEntry):
                item["securityFileStatus"] = _SAFE
        shown.append(item)
    return shown


def commit_item(commit: Commit, *, formatted: bool) -> dict[str, Any]:
    """A commit as the history shows it."""
    item: dict[str, Any] = {
        "id": commit.sha, "title": commit.title, "message": commit.message, "date": iso(commit.at),
        "authors": [{"user": commit.author}],
    }  # fmt: skip
    if formatted:
        item["formatted"] = {"title": commit.title, "message": commit.message}
    return item


def refs(view: View) -> dict[str, Any]:
    """Branches and tags; there are no pull requests and no converted files."""
    kept: dict[str, list[dict[str, str]]] = {"branch": [], "tag": []}
    folder = {"branch": "refs/heads", "tag": "refs/tags"}
    for ref in view.refs():
        item = {"name": ref.name, "ref": f"{folder[ref.kind]}/{ref.name}", "targetCommit": ref.sha}
        kept[ref.kind].append(item)
    return {"branches": kept["branch"], "tags": kept["tag"], "converts": [], "pullRequests": []}


def _base(repo: Repo, commit: Commit) -> dict[str, Any]:
    about = {
        "_id": f"{repo.key:024x}", "id": repo.id, "author": repo.namespace, "sha": commit.sha,
        "lastModified": iso(repo.updated), "createdAt": iso(repo.created), "private": repo.private, "gated": False,
        "disabled": False, "downloads": 0, "likes": 0, "tags": [],
    }  # fmt: skip
    return about | ({"modelId": repo.id} if repo.type == "model" else {})


def _card(card: dict[str, Any], *, full: bool) -> dict[str, Any]:
    tags = card.get("tags")
    about: dict[str, Any] = {"tags": [tag for tag in tags if isinstance(tag, str)] if isinstance(tags, list) else []}
    for name in ("pipeline_tag", "library_name"):
        if isinstance(card.get(name), str):
            about[name] = card[name]
    if full and card:
        about["cardData"] = card
    return about


def _lfs(entry: FileEntry, name: str) -> dict[str, Any]:
    return {name: entry.sha256, "size": entry.size, "pointerSize": len(pointer(entry.sha256, entry.size))}


def _sibling(path: str, entry: FileEntry, *, with_blobs: bool) -> dict[str, Any]:
    if not with_blobs:
        return {"rfilename": path}
    item: dict[str, Any] = {"rfilename": path, "size": entry.size, "blobId": entry.oid}
    return item | ({"lfs": _lfs(entry, "sha256")} if entry.lfs else {})


def _entry(path: str, entry: Entry) -> dict[str, Any]:
    if not isinstance(entry, FileEntry):
        return {"type": "directory", "path": path, "size": 0, "oid": entry.oid}
    item: dict[str, Any] = {"type": "file", "path": path, "size": entry.size, "oid": entry.oid}
    if entry.lfs:
        item["lfs"] = _lfs(entry, "oid")
    if entry.xet is not None:
        item["xetHash"] = entry.xet
    return item
