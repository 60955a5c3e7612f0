"""The HTTP routes of what is in a repository: trees, commits, branches, tags, and the steps of an upload."""

from __future__ import annotations

import base64
import binascii
import itertools
import json
import sqlite3
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from . import repo_views
from .app import xet_token_response
from .auth import check_write
from .blobs import SHA256
from .repo_access import Access, Target
from .repo_commit import Contents, Draft, check_text, receive, upload_mode
from .repo_trees import FileEntry, Trees, check_path
from .repos import MAIN, TYPES, Commit, Message, View
from .responses import HubError, link_next, page_limit, read_body, read_object
from .spaces import Spaces

if TYPE_CHECKING:
    from .app import Hub

MAX_EXPANDED = 100
MAX_PATHS = 5000
MAX_PREUPLOAD = 1000
MAX_GITIGNORE = 256 << 10
_TRUE = ("true", "1")


def routes(hub: Hub) -> list[BaseRoute]:
    """The routes below /api/{models,datasets,spaces}/{namespace}/{name}/."""
    known = _Routes(hub)
    posts: dict[str, Callable[[Target, dict[str, Any]], Response]] = {
        "branch": known.create_branch, "tag": known.create_tag, "super-squash": known.squash,
        "preupload": known.preupload,
    }  # fmt: skip
    found: list[BaseRoute] = []
    for kind in TYPES:
        one = f"/api/{kind}s/{{namespace}}/{{name}}"
        found += [
            Route(one + "/tree/{rest:path}", known.tree, methods=["GET"]),
            Route(one + "/paths-info/{rest:path}", known.paths_info, methods=["POST"]),
            Route(one + "/refs", known.refs, methods=["GET"]),
            Route(one + "/commits/{rest:path}", known.commits, methods=["GET"]),
            Route(one + "/branch/{rest:path}", known.deleting("branch"), methods=["DELETE"]),
            Route(one + "/tag/{rest:path}", known.deleting("tag"), methods=["DELETE"]),
            Route(one + "/commit/{rest:path}", known.commit, methods=["POST"]),
            Route(one + "/xet-{token}-token/{rest:path}", known.xet_token, methods=["GET"]),
            Route(one + "/lfs-files/duplicate", known.duplicate, methods=["POST"]),
        ]
        for action, change in posts.items():
            found.append(Route(f"{one}/{action}/{{rest:path}}", known.posting(change), methods=["POST"]))
    return found


class _Routes:
    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._access = Access(hub)
        self._repos = self._access.repos
        self._contents = Contents(hub.cas, hub.blobs)
        self._spaces = Spaces(hub.db, hub.blobs)

    def posting(self, change: Callable[[Target, dict[str, Any]], Response]) -> Callable[[Request], Any]:
        """The endpoint that lets whoever may write call `change` with the body."""

        async def endpoint(request: Request) -> Response:
            target = await run_in_threadpool(self._to_change, request)
            return await run_in_threadpool(change, target, await read_object(request))

        return endpoint

    # Looking

    def tree(self, request: Request) -> Response:
        target, query = self._access.readable(request), request.query_params
        expand = query.get("expand", "").lower() in _TRUE
        limit = page_limit(request, self._hub.options.page_size)
        limit = min(limit, MAX_EXPANDED) if expand else limit
        recursive = query.get("recursive", "").lower() in _TRUE
        with self._repos.view(target.repo) as view:
            commit = view.commit(target.revision)
            walk = view.trees.walk(commit.tree, target.path, recursive=recursive, after=query.get("cursor", ""))
            found = list(itertools.islice(walk, limit + 1))
            shown = repo_views.entries(view, commit, found[:limit], expand=expand)
        headers = {}
        if len(found) > limit:
            headers["Link"] = link_next(request, self._hub.options.public_url, cursor=found[limit - 1][0])
        return JSONResponse(shown, headers=headers)

    async def paths_info(self, request: Request) -> Response:
        target = await run_in_threadpool(self._access.readable, request)
        paths, expand = _asked_paths(await read_body(request), request.headers.get("content-type", ""))

        def look() -> list[dict[str, Any]]:
            with self._repos.view(target.repo) as view:
                commit = view.commit(target.revision)
                clean = dict.fromkeys(path.strip("/") for path in paths)
                found = [(path, view.trees.find(commit.tree, path)) for path in clean if path]
                present = [(path, entry) for path, entry in found if entry is not None]
                return repo_views.entries(view, commit, present, expand=expand)

        return JSONResponse(await run_in_threadpool(look))

    def refs(self, request: Request) -> Response:
        target = self._access.readable(request)
        with self._repos.view(target.repo) as view:
            return JSONResponse(repo_views.refs(view))

    def commits(self, request: Request) -> Response:
        target, query = self._access.readable(request), request.query_params
        limit = page_limit(request, self._hub.options.page_size)
        formatted = "formatted" in query.getlist("expand[]")
        with self._repos.view(target.repo) as view:
            start = view.commit(query.get("cursor") or target.revision)
            found = list(itertools.islice(view.history(start), limit + 1))
        headers = {}
        if len(found) > limit:
            headers["Link"] = link_next(request, self._hub.options.public_url, cursor=found[limit].sha)
        shown = [repo_views.commit_item(commit, formatted=formatted) for commit in found[:limit]]
        return JSONResponse(shown, headers=headers)

    def xet_token(self, request: Request) -> Response:
        kind = request.path_params["token"]
        if kind not in ("read", "write"):
            raise HubError(404, f"no such token: {kind}")
        _ = self._to_change(request) if kind == "write" else self._access.readable(request)
        return xet_token_response(self._hub, request, write=kind == "write")

    # Branches and tags

    def create_branch(self, target: Target, body: dict[str, Any]) -> Response:
        start = check_text(body.get("startingPoint"), "startingPoint") or MAIN
        self._repos.create_ref(target.repo, "branch", "/".join(target.rest), start)
        return JSONResponse({"success": True})

    def create_tag(self, target: Target, body: dict[str, Any]) -> Response:
        name, message = check_text(body.get("tag"), "tag"), check_text(body.get("message"), "message")
        self._repos.create_ref(target.repo, "tag", name, "/".join(target.rest), message)
        return JSONResponse({"success": True})

    def deleting(self, kind: str) -> Callable[[Request], Response]:
        """The endpoint that deletes branches or tags."""

        def endpoint(request: Request) -> Response:
            target = self._access.writable(request)
            self._repos.delete_ref(target.repo, kind, "/".join(target.rest))
            return JSONResponse({"success": True})

        return endpoint

    def squash(self, target: Target, body: dict[str, Any]) -> Response:
        branch = "/".join(target.rest)
        title = check_text(body.get("message"), "message") or f"Super-squash branch {branch}"
        self._repos.squash(target.repo, branch, Message(target.caller.name, title))
        return JSONResponse({"success": True})

    # Uploads

    def preupload(self, target: Target, body: dict[str, Any]) -> Response:
        """Say for each file whether it comes in the commit or before it, and what is there now."""
        files = body.get("files")
        if not isinstance(files, list) or len(files) > MAX_PREUPLOAD or not all(_is_file(file) for file in files):
            raise HubError(400, f"files must be a list of at most {MAX_PREUPLOAD} objects with a path and a size")
        with self._repos.view(target.repo) as view:
            root = view.commit("/".join(target.rest)).tree
            ignored = self._ignored(view, root, body.get("gitIgnore"))
            shown = [
                {
                    "path": check_path(file["path"]),
                    "uploadMode": upload_mode(file["path"], file["size"], _sample(file)),
                    "shouldIgnore": ignored(file["path"]),
                    "oid": entry.etag if isinstance(entry := view.trees.find(root, file["path"]), FileEntry) else None,
                }
                for file in files
            ]
        return JSONResponse({"files": shown})

    async def commit(self, request: Request) -> Response:
        target = await run_in_threadpool(self._to_change, request)
        draft = Draft(self._contents, self._hub.blobs)
        try:
            await receive(draft, request.stream())
            made = await run_in_threadpool(self._apply, target, draft)
        finally:
            await run_in_threadpool(draft.discard)
        url = f"{self._hub.base_url(request)}/{target.repo.path}/commit/{made.sha}"
        return JSONResponse({"success": True, "commitOid": made.sha, "commitUrl": url, "hookOutput": ""})

    async def duplicate(self, request: Request) -> Response:
        """Say which LFS files another repository cannot take over from this one; all share one store already."""
        source = await run_in_threadpool(self._access.readable, request)
        body = await read_object(request)
        target, files = body.get("target"), body.get("files")
        if not isinstance(target, dict) or not isinstance(files, list) or len(files) > MAX_PATHS:
            raise HubError(400, f"expected a target and a list of at most {MAX_PATHS} files")

        def note() -> list[dict[str, Any]]:
            repo = self._access.visible(source.caller, str(target.get("type")), str(target.get("name")))
            check_write(source.caller, repo.namespace)
            with self._repos.view(source.repo) as view:
                given = (str(file.get("sha256")) if isinstance(file, dict) else "" for file in files)
                names = [name if SHA256.fullmatch(name) else "" for name in given]
                owned = {name for name in names if name and view.owns_lfs(name)}
            return [{"sha256": name, "error": "no such file"} for name in names if name not in owned]

        return JSONResponse({"failed": await run_in_threadpool(note)})

    def _to_change(self, request: Request) -> Target:
        if request.query_params.get("create_pr", "").lower() in _TRUE:
            raise HubError(501, "this Hub has no pull requests; commit to a branch instead")
        return self._access.writable(request)

    def _apply(self, target: Target, draft: Draft) -> Commit:
        repo = target.repo
        draft.publish()

        def also(connection: sqlite3.Connection, trees: Trees, root: str) -> None:
            if repo.type == "space":
                self._spaces.on_commit(connection, repo.key, trees, root)

        message = Message(target.caller.name, draft.title, draft.text)
        branch = "/".join(target.rest)
        return self._repos.commit(repo, branch, message, draft.apply, parent=draft.parent, lfs=draft.lfs(), also=also)

    def _ignored(self, view: View, root: str, given: object) -> Callable[[str], bool]:
        """What a .gitignore leaves out: the one sent along, else the one in the repository."""
        from pathspec import GitIgnoreSpec

        text = given if isinstance(given, str) else ""
        entry = view.trees.find(root, ".gitignore")
        if given is None and isinstance(entry, FileEntry) and not entry.lfs and entry.size <= MAX_GITIGNORE:
            text = b"".join(self._hub.blobs.read(entry.sha256)).decode("utf-8", "replace")
        if len(text) > MAX_GITIGNORE:
            raise HubError(413, f"the .gitignore is longer than {MAX_GITIGNORE} characters")
        try:
            spec = GitIgnoreSpec.from_lines(text.splitlines())
        except ValueError as error:
            raise HubError(400, f"the .gitignore cannot be read ({error})") from None
        return lambda path: bool(spec.match_file(path))


def _is_file(file: object) -> bool:
    return isinstance(file, dict) and isinstance(file.get("path"), str) and type(file.get("size")) is int


def _sample(file: dict[str, Any]) -> bytes:
    try:
        return base64.b64decode(str(file.get("sample", "")))
    except (binascii.Error, ValueError):
        raise HubError(400, f"the sample of {file['path']} is not base64") from None


def _asked_paths(body: bytes, content_type: str) -> tuple[list[str], bool]:
    """(paths, expand) of a paths-info request, whose body is a form or JSON. Raises HubError 400."""
    try:
        if "json" in content_type:
            value = json.loads(body)
            paths, expand = value.get("paths"), value.get("expand", False)
        else:
            form = parse_qs(body.decode("ascii"), keep_blank_values=True, max_num_fields=MAX_PATHS + 10)
            paths, expand = form.get("paths", []), form.get("expand", [""])[-1].lower() in _TRUE
    except (ValueError, AttributeError, RecursionError) as error:
        raise HubError(400, f"the body is no form and no JSON object with paths ({error})") from None
    paths = [paths] if isinstance(paths, str) else paths
    if not isinstance(paths, list) or len(paths) > MAX_PATHS or not all(isinstance(path, str) for path in paths):
        raise HubError(400, f"paths must be a list of at most {MAX_PATHS} texts")
    return paths, bool(expand)
