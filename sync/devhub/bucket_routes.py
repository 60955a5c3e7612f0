"""The HTTP routes of buckets: create, look up, list, change, resolve, follow. Named and answered as by the Hub."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from . import batch, events, listing
from .app import xet_token_response
from .auth import Caller, check_read, check_write
from .buckets import Bucket, Entry
from .cdn import serve_contents
from .responses import HubError, iso, link_next, no_entry, now_ms, page_limit, read_object

if TYPE_CHECKING:
    from .app import Hub

MAX_PATHS = 1000
MAX_PATHS_BODY = 4 << 20


def routes(hub: Hub) -> list[BaseRoute]:
    """Every route below /api/buckets and /buckets/…/resolve."""
    bell = events.Bell()
    hub.buckets.on_change = bell.ring
    one = "/api/buckets/{namespace}/{name}"
    known = _Routes(hub, bell)
    return [
        Route("/api/buckets/{namespace}", known.listed, methods=["GET"]),
        Route(one, known.create, methods=["POST"]),
        Route(one, known.info, methods=["GET"]),
        Route(one, known.delete, methods=["DELETE"]),
        Route(one + "/settings", known.settings, methods=["PUT", "POST"]),
        Route(one + "/tree", known.tree, methods=["GET"]),
        Route(one + "/tree/{prefix:path}", known.tree, methods=["GET"]),
        Route(one + "/paths-info", known.paths_info, methods=["POST"]),
        Route(one + "/batch", known.batch, methods=["POST"]),
        Route(one + "/events", known.events, methods=["GET"]),
        Route(one + "/xet-{kind}-token", known.xet_token, methods=["GET"]),
        Route("/buckets/{namespace}/{name}/resolve/{path:path}", known.resolve, methods=["GET", "HEAD"]),
    ]


def move(hub: Hub, caller: Caller, source: str, target: str) -> None:
    """Rename the bucket with the id `source`, for `POST /api/repos/move` with type `bucket`.

    Raises HubError 400, 401, 403, 404 or 409.
    """
    (namespace, name), (to_namespace, to_name) = _id(source), _id(target)
    bucket = _writable(hub, caller, namespace, name)
    check_write(caller, to_namespace)
    hub.buckets.move(bucket, to_namespace, to_name)


def described(bucket: Bucket) -> dict[str, Any]:
    """A bucket as its info and the list of buckets show it."""
    return {
        "id": bucket.id, "private": bucket.private, "createdAt": iso(bucket.created),
        "updatedAt": iso(bucket.updated), "size": bucket.size, "totalFiles": bucket.files,
    }  # fmt: skip


class _Routes:
    def __init__(self, hub: Hub, bell: events.Bell) -> None:
        self._hub = hub
        self._bell = bell

    def listed(self, request: Request) -> Response:
        caller = self._hub.caller(request)
        namespace, query = request.path_params["namespace"], request.query_params
        if namespace == "me":
            namespace = _own(caller)
        limit = page_limit(request, self._hub.options.page_size)
        after, search = query.get("cursor", ""), query.get("search", "")
        found: list[Bucket] = []
        for bucket in self._hub.buckets.listed(namespace, after=after, search=search):
            if _visible(caller, bucket):
                found.append(bucket)
            if len(found) > limit:
                break
        body = [described(bucket) for bucket in found[:limit]]
        return self._paged(request, body, found[limit - 1].id if len(found) > limit else None)

    async def create(self, request: Request) -> Response:
        hub, caller = self._hub, self._hub.caller(request)
        namespace, name = request.path_params["namespace"], request.path_params["name"]
        if namespace == "me":
            namespace = _own(caller)
        check_write(caller, namespace)
        wanted = await read_object(request)
        private = _private(wanted, default=False)
        bucket, made = await run_in_threadpool(hub.buckets.create, namespace, name, private=private)
        url = f"{hub.base_url(request)}/buckets/{bucket.id}"
        if not made:
            raise HubError(409, f"You already created this bucket: {bucket.id}", body={"url": url})
        return JSONResponse({"url": url, "id": bucket.id, "name": bucket.id})

    def info(self, request: Request) -> Response:
        _, bucket = self._readable(request)
        return JSONResponse(described(bucket))

    def delete(self, request: Request) -> Response:
        _, bucket = self._to_change(request)
        self._hub.buckets.delete(bucket)
        return JSONResponse({"success": True})

    async def settings(self, request: Request) -> Response:
        _, bucket = await run_in_threadpool(self._to_change, request)
        private = _private(await read_object(request), default=bucket.private)
        await run_in_threadpool(self._hub.buckets.set_private, bucket, private=private)
        return JSONResponse({"private": private})

    def tree(self, request: Request) -> Response:
        hub = self._hub
        _, bucket = self._readable(request)
        query, prefix = request.query_params, request.path_params.get("prefix", "")
        recursive = query.get("recursive", "false").lower() in ("true", "1")
        limit = page_limit(request, hub.options.page_size)
        ago = hub.faults.seconds("stale_list", request.method, request.url.path)
        with hub.buckets.view(bucket, seconds_ago=ago) as view:
            items, cursor = listing.page(view, prefix, recursive=recursive, cursor=query.get("cursor"), limit=limit)
        return self._paged(request, [_shown(item) for item in items], cursor)

    async def paths_info(self, request: Request) -> Response:
        hub = self._hub
        _, bucket = await run_in_threadpool(self._readable, request)
        paths = (await read_object(request, MAX_PATHS_BODY)).get("paths")
        if not isinstance(paths, list) or len(paths) > MAX_PATHS or not all(isinstance(p, str) for p in paths):
            raise HubError(400, f"paths must be a list of at most {MAX_PATHS} texts")
        ago = hub.faults.seconds("stale_info", request.method, request.url.path)

        def look() -> list[dict[str, Any]]:
            with hub.buckets.view(bucket, seconds_ago=ago) as view:
                found = (view.get(path) for path in dict.fromkeys(paths))
                return [_shown(entry) for entry in found if entry is not None]

        return JSONResponse(await run_in_threadpool(look))

    async def batch(self, request: Request) -> Response:
        caller, bucket = await run_in_threadpool(self._to_change, request)
        return await batch.answer(self._hub, request, caller, bucket)

    def xet_token(self, request: Request) -> Response:
        kind = request.path_params["kind"]
        if kind not in ("read", "write"):
            raise HubError(404, f"no such token: {kind}")
        _ = self._to_change(request) if kind == "write" else self._readable(request)
        return xet_token_response(self._hub, request, write=kind == "write")

    def resolve(self, request: Request) -> Response:
        hub, path = self._hub, request.path_params["path"]
        _, bucket = self._readable(request)
        ago = hub.faults.seconds("stale_info", request.method, request.url.path)
        with hub.buckets.view(bucket, seconds_ago=ago) as view:
            entry = view.get(path)
        if entry is None:
            raise no_entry(path)
        token_url = f"{hub.base_url(request)}/api/buckets/{bucket.id}/xet-read-token"
        headers = {
            "ETag": f'"{entry.hash}"',
            "X-Linked-Etag": f'"{entry.hash}"',
            "X-Linked-Size": str(entry.size),
            "X-Xet-Hash": entry.hash,
            "Link": f'<{token_url}>; rel="xet-auth"',
            "Content-Type": entry.content_type or "application/octet-stream",
            "X-Content-Type-Options": "nosniff",
            "Content-Security-Policy": "sandbox; default-src 'none'",
        }
        return serve_contents(hub, request, entry.hash, headers, path.rsplit("/", 1)[-1])

    async def events(self, request: Request) -> Response:
        _, bucket = await run_in_threadpool(self._readable, request)
        oldest = now_ms() - int(self._hub.options.history_seconds * 1000)
        return events.stream(self._hub, self._bell, bucket, request, oldest)

    def _readable(self, request: Request) -> tuple[Caller, Bucket]:
        caller = self._hub.caller(request)
        bucket = self._hub.buckets.find(request.path_params["namespace"], request.path_params["name"])
        check_read(caller, private=bucket.private, namespace=bucket.namespace, what=f"Bucket {bucket.id}")
        return caller, bucket

    def _to_change(self, request: Request) -> tuple[Caller, Bucket]:
        caller = self._hub.caller(request)
        params = request.path_params
        return caller, _writable(self._hub, caller, params["namespace"], params["name"])

    def _paged(self, request: Request, body: list[dict[str, Any]], cursor: str | None) -> Response:
        headers = {}
        if cursor is not None:
            headers["Link"] = link_next(request, self._hub.options.public_url, cursor=cursor)
        return JSONResponse(body, headers=headers)


def _writable(hub: Hub, caller: Caller, namespace: str, name: str) -> Bucket:
    """The bucket, when the caller may change it; what they may not see stays a 404."""
    bucket = hub.buckets.find(namespace, name)
    check_read(caller, private=bucket.private, namespace=bucket.namespace, what=f"Bucket {bucket.id}")
    check_write(caller, bucket.namespace)
    return bucket


def _visible(caller: Caller, bucket: Bucket) -> bool:
    try:
        check_read(caller, private=bucket.private, namespace=bucket.namespace, what=bucket.id)
    except HubError:
        return False
    return True


def _own(caller: Caller) -> str:
    if caller.role == "anonymous":
        raise HubError(401, "Invalid username or password: send a token, or name the namespace")
    return caller.name


def _id(text: str) -> tuple[str, str]:
    namespace, slash, name = text.partition("/")
    if not slash:
        raise HubError(400, f"{text!r} is no bucket id; expected namespace/name")
    return namespace, name


def _private(wanted: dict[str, Any], *, default: bool) -> bool:
    """Whether a body asks for a private bucket: `visibility` or `private`."""
    visibility, private = wanted.get("visibility"), wanted.get("private")
    if visibility not in (None, "public", "private") or not isinstance(private, bool | None):
        raise HubError(400, "visibility must be public or private, private must be true or false")
    if visibility is not None:
        return bool(visibility == "private")
    return default if private is None else private


def _shown(item: listing.Item) -> dict[str, Any]:
    if not isinstance(item, Entry):
        return {"type": "directory", "path": item[0], "uploadedAt": iso(item[1])}
    out: dict[str, Any] = {"type": "file", "path": item.path, "size": item.size, "xetHash": item.hash}
    if item.mtime is not None:
        out["mtime"] = iso(item.mtime)
    return out | {"uploadedAt": iso(item.uploaded)}
