"""The HTTP routes of repositories as a whole: create, list, look up, change, delete; answered as by the Hub."""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from . import bucket_routes, repo_files, repo_git_routes, repo_views
from .auth import Caller, check_write
from .blobs import Blobs
from .repo_access import Access, new_id
from .repo_cards import parse_card
from .repo_commit import LFS_SUFFIXES
from .repo_trees import Editor, FileEntry, git_id
from .repos import MAIN, TYPES, Message, Repo
from .responses import HubError, link_next, page_limit, read_object
from .spaces import SDKS, Spaces

if TYPE_CHECKING:
    from .app import Hub

TRUE = ("true", "1")
MAX_LISTED = 1000


def routes(hub: Hub) -> list[BaseRoute]:
    """Every route of repositories; those of Spaces alone are in `spaces`."""
    known = _Routes(hub)
    hub.repo_readable = known.access.is_readable
    found: list[BaseRoute] = [
        Route("/api/repos/create", known.create, methods=["POST"]),
        Route("/api/repos/delete", known.delete, methods=["DELETE"]),
        Route("/api/repos/move", known.move, methods=["POST"]),
        Route("/api/validate-yaml", known.validate_yaml, methods=["POST"]),
    ]
    for kind in TYPES:
        one = f"/api/{kind}s/{{namespace}}/{{name}}"
        found += [
            Route(f"/api/{kind}s", known.listing(kind), methods=["GET"]),
            Route(one, known.info, methods=["GET"]),
            Route(one + "/revision/{rest:path}", known.info, methods=["GET"]),
            Route(one + "/settings", known.settings, methods=["PUT", "POST"]),
            Route(one + "/auth-check", known.auth_check, methods=["GET"]),
            Route(one + "/auth-check/write", known.auth_check_write, methods=["GET"]),
            Route(one + "/discussions", known.discussions, methods=["GET"]),
            Route(one + "/discussions", known.open_discussion, methods=["POST"]),
        ]
    return [*found, *repo_git_routes.routes(hub), *repo_files.routes(hub)]


class _Routes:
    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._spaces = Spaces(hub.db, hub.blobs)
        self.access = Access(hub)

    async def create(self, request: Request) -> Response:
        caller, body = self._hub.caller(request), await read_object(request)
        kind = _kind(body)
        namespace, name = new_id(caller, body.get("organization"), body.get("name"))
        made = await run_in_threadpool(self._create, caller, kind, namespace, name, body)
        repo = Repo(0, kind, namespace, name, private=False, created=0, updated=0)
        url = f"{self._hub.base_url(request)}/{repo.path}"
        if not made:
            raise HubError(409, f"You already created this {kind} repo: {repo.id}", body={"url": url})
        return JSONResponse({"url": url, "name": repo.id, "id": repo.id})

    async def delete(self, request: Request) -> Response:
        caller, body = self._hub.caller(request), await read_object(request)
        namespace = caller.name if body.get("organization") is None else body["organization"]
        repo = await run_in_threadpool(self._to_change, caller, _kind(body), f"{namespace}/{body.get('name')}")
        await run_in_threadpool(self.access.repos.delete, repo)
        return JSONResponse({"success": True})

    async def move(self, request: Request) -> Response:
        caller, body = self._hub.caller(request), await read_object(request)
        source, target = str(body.get("fromRepo")), str(body.get("toRepo"))
        if body.get("type") == "bucket":
            await run_in_threadpool(bucket_routes.move, self._hub, caller, source, target)
            return JSONResponse({"success": True})
        repo = await run_in_threadpool(self._to_change, caller, _kind(body), source)
        namespace, slash, name = target.partition("/")
        if not slash:
            raise HubError(400, f"{target!r} is no repository id; expected namespace/name")
        new_id(caller, namespace, name)
        await run_in_threadpool(self.access.repos.move, repo, namespace, name)
        return JSONResponse({"success": True})

    async def settings(self, request: Request) -> Response:
        target = await run_in_threadpool(self.access.writable, request)
        body = await read_object(request)
        if body.get("gated"):
            raise HubError(501, "this Hub has no gated repositories; make it private instead")
        private = _private(body, default=target.repo.private)
        await run_in_threadpool(self.access.repos.set_private, target.repo, private=private)
        return JSONResponse({"private": private, "visibility": "private" if private else "public"})

    async def validate_yaml(self, request: Request) -> Response:
        """Check the metadata of a README.md, as clients ask before they upload one."""
        content = (await read_object(request)).get("content")
        if not isinstance(content, str):
            raise HubError(400, "content must be a text")
        try:
            await run_in_threadpool(parse_card, content)
        except ValueError as error:
            return JSONResponse({"errors": [{"message": str(error)}], "warnings": []}, status_code=400)
        return JSONResponse({"errors": [], "warnings": []})

    def info(self, request: Request) -> Response:
        target = self.access.readable(request)
        with_blobs = request.query_params.get("blobs", "").lower() in TRUE
        with self.access.repos.view(target.repo) as view:
            commit = view.commit("/".join(target.rest) or MAIN)
            about = repo_views.info(view, self._hub.blobs, commit, with_blobs=with_blobs)
        return JSONResponse(about | self._more(target.repo))

    def listing(self, kind: str) -> Callable[[Request], Response]:
        """The endpoint that lists the repositories of a type."""

        def endpoint(request: Request) -> Response:
            return self._list(request, kind)

        return endpoint

    def auth_check(self, request: Request) -> Response:
        self.access.readable(request)
        return JSONResponse({})

    def auth_check_write(self, request: Request) -> Response:
        self.access.writable(request)
        return JSONResponse({})

    def discussions(self, request: Request) -> Response:
        self.access.readable(request)
        return JSONResponse({"discussions": [], "count": 0, "start": 0})

    def open_discussion(self, request: Request) -> Response:
        self.access.readable(request)
        raise HubError(501, "this Hub has no discussions and no pull requests; commit to a branch instead")

    def _list(self, request: Request, kind: str) -> Response:
        query = request.query_params
        limit = min(page_limit(request, self._hub.options.page_size), MAX_LISTED)
        start = query.get("cursor", "0")
        if not start.isascii() or not start.isdigit() or len(start) > 12:
            raise HubError(400, "cursor is not one that this Hub gave; list again from the start")
        caller = self._hub.caller(request)
        found = self.access.listed(caller, kind, query.get("author"), query.get("search", ""))
        order = {"lastModified": "updated", "createdAt": "created"}.get(query.get("sort", ""))
        if order is not None:
            found.sort(key=lambda repo: int(getattr(repo, order)), reverse=True)
        wanted = query.getlist("filter")
        shown = list[dict[str, Any]]()
        at = int(start)
        while at < len(found) and len(shown) < limit:
            about = self._listed(found[at])
            at += 1
            if about is not None and set(wanted) <= set(about["tags"]):
                shown.append(about)
        headers = {"Link": link_next(request, self._hub.options.public_url, cursor=str(at))} if at < len(found) else {}
        return JSONResponse(shown, headers=headers)

    def _listed(self, repo: Repo) -> dict[str, Any] | None:
        """A repository for a list; None when it was deleted meanwhile."""
        try:
            with self.access.repos.view(repo) as view:
                about = repo_views.listed(view, self._hub.blobs)
            return about | self._more(repo)
        except HubError:
            return None

    def _more(self, repo: Repo) -> dict[str, Any]:
        if repo.type != "space":
            return {}
        with self.access.repos.view(repo) as view:
            return self._spaces.info(view.connection, repo)

    def _to_change(self, caller: Caller, kind: str, id_: str) -> Repo:
        repo = self.access.visible(caller, kind, id_)
        check_write(caller, repo.namespace)
        return repo

    def _create(self, caller: Caller, kind: str, namespace: str, name: str, body: dict[str, Any]) -> bool:
        """Create a repository with the files that every new one has; False: it exists."""
        files = {".gitattributes": _gitattributes()}
        sdk = body.get("sdk")
        if kind == "space":
            if not isinstance(sdk, str) or sdk not in SDKS:
                raise HubError(400, f"sdk must be one of {', '.join(SDKS)}")
            files["README.md"] = f"---\ntitle: {name}\nsdk: {sdk}\n---\n"
        entries = {path: _keep(self._hub.blobs, text.encode()) for path, text in files.items()}

        def fill(editor: Editor) -> None:
            for path, entry in entries.items():
                editor.put(path, entry)

        def also(connection: sqlite3.Connection, repo: int) -> None:
            if kind == "space":
                self._spaces.create(connection, repo, body)

        message = Message(caller.name, "initial commit")
        private = _private(body, default=False)
        return self.access.repos.create(kind, namespace, name, private=private, message=message, change=fill, also=also)


def _kind(body: dict[str, Any]) -> str:
    kind = body.get("type") or "model"
    if kind not in TYPES:
        raise HubError(400, f"type must be one of {', '.join(TYPES)}")
    return str(kind)


def _private(body: dict[str, Any], *, default: bool) -> bool:
    """Whether a body asks for privacy: `visibility` or `private`; the files of a protected Space are private."""
    visibility, private = body.get("visibility"), body.get("private")
    if visibility not in (None, "public", "private", "protected") or not isinstance(private, bool | None):
        raise HubError(400, "visibility must be public, private or protected, private must be true or false")
    if visibility is not None:
        return bool(visibility != "public")
    return default if private is None else private


def _gitattributes() -> str:
    return "".join(f"*.{suffix} filter=lfs diff=lfs merge=lfs -text\n" for suffix in LFS_SUFFIXES)


def _keep(blobs: Blobs, data: bytes) -> FileEntry:
    """Make a small content readable; returns its entry for a tree."""
    sha256 = hashlib.sha256(data).hexdigest()
    if blobs.size(sha256) is None:
        staged = blobs.stage()
        try:
            staged.write(data)
            blobs.publish([staged])
        finally:
            staged.discard()
    return FileEntry(git_id("blob", data), len(data), sha256, lfs=False, xet=None)
