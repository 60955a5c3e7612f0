"""Contents of repositories over HTTP: resolve and raw, and what is uploaded over Git LFS instead of xet storage."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from .blobs import SHA256, Blobs, Staged
from .cdn import serve_contents
from .repo_access import Access, Target
from .repo_commit import Contents
from .repo_trees import FileEntry, pointer
from .responses import HubError, Reader, error_response, no_entry, read_object, serve_file

if TYPE_CHECKING:
    from .app import Hub

MAX_LFS_OBJECTS = 1000
MAX_LFS_BYTES = 1 << 40
_LFS_JSON = "application/vnd.git-lfs+json"


def routes(hub: Hub) -> list[BaseRoute]:
    """Every route that moves file contents, besides those of xet storage."""
    known = _Routes(hub)
    found: list[BaseRoute] = [
        Route("/lfs/{sha256}", known.put, methods=["PUT"]),
        Route("/lfs/{sha256}", known.get, methods=["GET", "HEAD"]),
    ]
    for prefix in ("/datasets", "/spaces", ""):
        one = prefix + "/{namespace}/{name}"
        found += [
            Route(one + "/resolve/{rest:path}", known.resolve, methods=["GET", "HEAD"]),
            Route(one + "/raw/{rest:path}", known.raw, methods=["GET", "HEAD"]),
            Route(one + "/info/lfs/objects/batch", known.batch, methods=["POST"]),
            Route(one + "/info/lfs/objects/verify", known.verify, methods=["POST"]),
        ]
    return found


class _Routes:
    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._access = Access(hub)
        self._contents = Contents(hub.cas, hub.blobs)

    def resolve(self, request: Request) -> Response:
        target, entry, headers = self._look(request)
        if entry is None:
            return _missing(target.path, headers)
        if not entry.lfs:
            return serve_file(request, self._reader(entry.sha256), entry.size, headers)
        headers |= {"X-Linked-Size": str(entry.size), "X-Linked-Etag": headers["ETag"]}
        if entry.xet is None:
            return serve_file(request, self._reader(entry.sha256), entry.size, headers)
        repo = target.repo
        base = f"{self._hub.base_url(request)}/api/{repo.type}s/{repo.id}"
        token_url = f"{base}/xet-read-token/{headers['X-Repo-Commit']}"
        headers |= {"X-Xet-Hash": entry.xet, "Link": f'<{token_url}>; rel="xet-auth"'}
        return serve_contents(self._hub, request, entry.xet, headers, target.path.rsplit("/", 1)[-1])

    def raw(self, request: Request) -> Response:
        """Like resolve, but an LFS file shows its pointer."""
        target, entry, headers = self._look(request)
        if entry is None:
            return _missing(target.path, headers)
        if not entry.lfs:
            return serve_file(request, self._reader(entry.sha256), entry.size, headers)
        text = pointer(entry.sha256, entry.size)
        headers["ETag"] = f'"{entry.oid}"'
        return serve_file(request, lambda start, end: iter([text[start:end]]), len(text), headers)

    async def batch(self, request: Request) -> Response:
        """The Git LFS batch API, transfer `basic`."""
        body = await read_object(request)
        operation, objects = body.get("operation"), body.get("objects")
        if operation not in ("upload", "download") or not isinstance(objects, list):
            raise HubError(422, "operation must be upload or download, and objects a list")
        if len(objects) > MAX_LFS_OBJECTS:
            raise HubError(413, f"{len(objects)} objects at once; at most {MAX_LFS_OBJECTS}")
        find = self._access.writable if operation == "upload" else self._access.readable
        target = await run_in_threadpool(find, request)
        describe = self._upload if operation == "upload" else self._download

        def answer() -> list[dict[str, Any]]:
            return [describe(request, target, *_object(value)) for value in objects]

        described = await run_in_threadpool(answer)
        return JSONResponse({"transfer": "basic", "objects": described, "hash_algo": "sha256"}, media_type=_LFS_JSON)

    async def verify(self, request: Request) -> Response:
        await run_in_threadpool(self._access.writable, request)
        sha256, size = _object(await read_object(request))
        await run_in_threadpool(self._contents.entry, sha256, size)
        return JSONResponse({}, media_type=_LFS_JSON)

    async def put(self, request: Request) -> Response:
        """Receive a content at a URL that `batch` signed."""
        sha256, size = self._signed(request, "put")
        staged = await run_in_threadpool(self._hub.blobs.stage)
        try:
            async for piece in request.stream():
                if staged.size + len(piece) > size:
                    raise HubError(400, f"the body is longer than the {size} bytes that were announced")
                await run_in_threadpool(staged.write, piece)
            await run_in_threadpool(_finish, self._hub.blobs, staged, sha256, size)
        finally:
            await run_in_threadpool(staged.discard)
        return JSONResponse({}, headers={"ETag": f'"{sha256}"'})

    def get(self, request: Request) -> Response:
        """Send a content from a URL that `batch` signed."""
        sha256, _ = self._signed(request, "get")
        found = self._contents.find(sha256)
        if found is None:
            raise HubError(404, "no such content")
        size, xet = found
        return serve_file(request, self._reader(sha256, xet), size, {"ETag": f'"{sha256}"'})

    def _look(self, request: Request) -> tuple[Target, FileEntry | None, dict[str, str]]:
        target = self._access.readable(request)
        with self._access.repos.view(target.repo) as view:
            commit = view.commit(target.revision)
            entry = view.trees.find(commit.tree, target.path)
        if not isinstance(entry, FileEntry):
            return target, None, {"X-Repo-Commit": commit.sha}
        name = target.path.rsplit("/", 1)[-1]
        headers = {
            "ETag": f'"{entry.etag}"',
            "X-Repo-Commit": commit.sha,
            "Content-Disposition": f"inline; filename*=UTF-8''{quote(name, safe='')}",
            "X-Content-Type-Options": "nosniff",
            "Content-Security-Policy": "sandbox; default-src 'none'",
        }
        return target, entry, headers

    def _reader(self, sha256: str, xet: str | None = None) -> Reader:
        def read(start: int, end: int) -> Iterator[bytes]:
            return self._hub.cas.read(xet, start, end) if xet else self._hub.blobs.read(sha256, start, end)

        return read

    def _upload(self, request: Request, target: Target, sha256: str, size: int) -> dict[str, Any]:
        found = self._contents.find(sha256)
        if found is not None:
            return {"oid": sha256, "size": found[0]} if found[0] == size else _failed(sha256, size, 422, "wrong size")
        href = self._href(request, "put", sha256, size)
        verify = f"{self._hub.base_url(request)}/{target.repo.path}.git/info/lfs/objects/verify"
        return {
            "oid": sha256,
            "size": size,
            "authenticated": True,
            "actions": {"upload": href, "verify": {"href": verify}},
        }

    def _download(self, request: Request, target: Target, sha256: str, size: int) -> dict[str, Any]:
        with self._access.repos.view(target.repo) as view:
            owned = view.owns_lfs(sha256)
        found = self._contents.find(sha256) if owned else None
        if found is None:
            return _failed(sha256, size, 404, "no such object in this repository")
        href = self._href(request, "get", sha256, found[0])
        return {"oid": sha256, "size": found[0], "authenticated": True, "actions": {"download": href}}

    def _href(self, request: Request, verb: str, sha256: str, size: int) -> dict[str, str]:
        query = self._hub.auth.sign(f"lfs {verb} {sha256} {size}")
        return {"href": f"{self._hub.base_url(request)}/lfs/{sha256}?size={size}&{query}"}

    def _signed(self, request: Request, verb: str) -> tuple[str, int]:
        sha256, query = request.path_params["sha256"], request.query_params
        size = query.get("size", "")
        what = f"lfs {verb} {sha256} {size}"
        if not self._hub.auth.signed(what, query.get("exp", ""), query.get("sig", "")):
            raise HubError(403, "the signature of this URL is wrong or has expired; ask the Hub for a new one")
        return sha256, int(size)


def _missing(path: str, headers: dict[str, str]) -> Response:
    """404 for a file that is not there; clients remember that for the commit."""
    answer = error_response(no_entry(path))
    answer.headers.update(headers)
    return answer


def _finish(blobs: Blobs, staged: Staged, sha256: str, size: int) -> None:
    if staged.size != size or staged.seal() != sha256:
        raise HubError(
            400, f"the body is not the announced content of {size} bytes with sha256 {sha256}; send it again"
        )
    blobs.publish([staged])


def _object(value: object) -> tuple[str, int]:
    """(oid, size) of an LFS object. Raises HubError 422."""
    oid, size = (value.get("oid"), value.get("size")) if isinstance(value, dict) else (None, None)
    if not isinstance(oid, str) or not SHA256.fullmatch(oid):
        raise HubError(422, "oid must be a sha256: 64 lower-case hex digits")
    if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size <= MAX_LFS_BYTES:
        raise HubError(422, f"size must be a number of bytes, at most {MAX_LFS_BYTES}")
    return oid, size


def _failed(sha256: str, size: int, code: int, message: str) -> dict[str, Any]:
    return {"oid": sha256, "size": size, "error": {"code": code, "message": message}}
