"""File contents from another origin: with --cdn, resolve answers 302 to a signed URL on a second port.

The real Hub does so; clients then keep the headers of the first answer and send no token to the second.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from .responses import HubError, Reader, serve_file

if TYPE_CHECKING:
    from .app import Hub


def serve_contents(hub: Hub, request: Request, file_hash: str, headers: Mapping[str, str], name: str) -> Response:
    """Answer a resolve with the contents of a xet file, directly or by redirect. `name` is the name for a download.

    The hash must be known to the store.
    """
    size = hub.cas.size(file_hash)
    assert size is not None
    if hub.options.cdn_port is None:
        return serve_file(request, _reader(hub, file_hash), size, headers)
    path = f"/cdn/{file_hash}/{quote(name, safe='')}"
    host = request.url.hostname or "127.0.0.1"
    host = f"[{host}]" if ":" in host else host
    location = f"http://{host}:{hub.options.cdn_port}{path}?{hub.auth.sign(f'/cdn/{file_hash}')}"
    kept = {k: v for k, v in headers.items() if k.lower() not in ("content-type", "content-disposition")}
    return Response(status_code=302, headers={**kept, "Location": location, "Content-Length": "0"})


def routes(hub: Hub) -> list[BaseRoute]:
    """GET and HEAD /cdn/HASH/NAME with a signature."""

    def contents(request: Request) -> Response:
        file_hash = request.path_params["hash"]
        query = request.query_params
        if not hub.auth.signed(f"/cdn/{file_hash}", query.get("exp", ""), query.get("sig", "")):
            raise HubError(403, "the signature of this URL is wrong or has expired; ask the Hub for a new one")
        size = hub.cas.size(file_hash)
        if size is None:
            raise HubError(404, "no such contents")
        return serve_file(request, _reader(hub, file_hash), size, {"ETag": f'"{file_hash}"'})

    return [Route("/cdn/{hash}/{name:path}", contents, methods=["GET", "HEAD"])]


def _reader(hub: Hub, file_hash: str) -> Reader:
    def read(start: int, end: int) -> Iterator[bytes]:
        return hub.cas.read(file_hash, start, end)

    return read
