"""What every route of the Hub answers with: errors as the clients read them, times, pages, files with ranges."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote, unquote, urlencode

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

Reader = Callable[[int, int], Iterator[bytes]]
"""(start, end) → the bytes from start to end, end exclusive, in pieces."""

MAX_JSON_BODY = 8 << 20
MAX_MESSAGE = 1000


class HubError(Exception):
    """An answer that is an error: HTTP status, one line, and the code that the clients turn into an exception.

    Codes: RepoNotFound (also for buckets), EntryNotFound, RevisionNotFound. `body` is merged into the JSON answer.
    """

    def __init__(
        self, status: int, message: str, code: str | None = None, body: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.body = dict(body or {})


def error_response(error: HubError) -> Response:
    """The answer for a HubError: JSON {"error"} and the headers X-Error-Message and X-Error-Code."""
    text = "".join(c if c.isprintable() else " " for c in error.message)
    line = " ".join(text.split())[:MAX_MESSAGE]
    headers = {"X-Error-Message": line.encode("ascii", "replace").decode()}
    if error.code:
        headers["X-Error-Code"] = error.code
    if error.status == 401:
        headers["WWW-Authenticate"] = 'Bearer realm="Authentication required"'
    return JSONResponse({"error": line, **error.body}, status_code=error.status, headers=headers)


def not_found(what: str) -> HubError:
    """404 for a bucket or repository that is not there, or not for this caller; the two look the same."""
    return HubError(404, f"{what} not found", "RepoNotFound")


def no_entry(path: str) -> HubError:
    """404 for a file that is not there."""
    return HubError(404, f"Entry not found: {path}", "EntryNotFound")


async def read_body(request: Request, limit: int = MAX_JSON_BODY) -> bytes:
    """The whole body of a small request; raises HubError 413 above `limit` bytes."""
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > limit:
            raise HubError(413, f"the body is larger than {limit} bytes; send less at once")
    return bytes(body)


async def read_object(request: Request, limit: int = MAX_JSON_BODY) -> dict[str, Any]:
    """The body as a JSON object ({} when empty); raises HubError 400 or 413."""
    body = await read_body(request, limit)
    try:
        value = json.loads(body) if body else {}
    except (ValueError, RecursionError) as error:
        raise HubError(400, f"the body is not JSON ({error})") from None
    if not isinstance(value, dict):
        raise HubError(400, f"the body must be a JSON object, found {type(value).__name__}")
    return value


def now_ms() -> int:
    """Milliseconds since 1970."""
    return time.time_ns() // 1_000_000


def iso(ms: int) -> str:
    """A time in milliseconds since 1970 as the Hub prints it: `2026-11-30T12:00:00.000Z`."""
    return datetime.fromtimestamp(ms // 1000, UTC).strftime("%Y-%m-%dT%H:%M:%S") + f".{ms % 1000:03d}Z"


def base_url(request: Request, public_url: str | None = None) -> str:
    """The endpoint as this client reaches it, without a closing slash."""
    return public_url or f"{request.url.scheme}://{request.url.netloc}"


def segments(request: Request) -> list[str]:
    """The parts of the raw path, split at real slashes first and unquoted after: `%2F` stays inside its part."""
    raw: bytes = request.scope.get("raw_path") or quote(request.scope["path"]).encode()
    return [unquote(part) for part in raw.split(b"?")[0].decode("latin-1").strip("/").split("/")]


def link_next(request: Request, public_url: str | None = None, **changes: str) -> str:
    """The value of a `Link` header that leads to the next page: this URL with `changes` in its query."""
    query = urlencode({**request.query_params, **changes})
    raw: bytes = request.scope.get("raw_path") or quote(request.scope["path"]).encode()
    path = raw.split(b"?")[0].decode("latin-1")
    return f'<{base_url(request, public_url)}{path}?{query}>; rel="next"'


def page_limit(request: Request, most: int) -> int:
    """The page size: `limit` of the query, at most `most`. Raises HubError 400."""
    text = request.query_params.get("limit")
    if text is None:
        return most
    if re.fullmatch(r"0*[1-9][0-9]{0,14}", text[:64], re.ASCII) is None:
        raise HubError(400, f"limit is {text[:64]!r}, expected a positive number")
    return min(int(text[:64]), most)


_RANGE = re.compile(r"bytes=([0-9]{0,18})-([0-9]{0,18})")


def parse_range(text: str | None, size: int) -> tuple[int, int] | None:
    """(start, end) with end exclusive for a single range, None when all is to be sent.

    Several ranges and malformed ones count as none, as RFC 9110 allows. Raises HubError 416 for one outside the file.
    """
    match = _RANGE.fullmatch((text or "").strip())
    if match is None or match[0] == "bytes=-":
        return None
    first, last = match[1], match[2]
    if not first:
        start, end = max(0, size - int(last)), size
    else:
        start, end = int(first), min(int(last) + 1 if last else size, size)
    if start >= size or (last and first and int(last) < int(first)) or start >= end:
        raise HubError(416, f"the range {text} is outside the file of {size} bytes")
    return start, end


def serve_file(request: Request, reader: Reader, size: int, headers: Mapping[str, str]) -> Response:
    """Answer GET or HEAD of one file: 200, 206 for a Range, 304 when If-None-Match names the `ETag` in `headers`."""
    out = {"Accept-Ranges": "bytes", "Content-Type": "application/octet-stream", **headers}
    etag = out.get("ETag")
    asked = request.headers.get("if-none-match", "")
    if etag and (asked.strip() == "*" or etag in {tag.strip().removeprefix("W/") for tag in asked.split(",")}):
        kept = {name: value for name, value in out.items() if name.lower() not in ("content-type", "content-length")}
        return Response(status_code=304, headers=kept)
    if_range = request.headers.get("if-range")
    wanted = None if if_range is not None and if_range != etag else request.headers.get("range")
    try:
        part = parse_range(wanted, size)
    except HubError as error:
        answer = error_response(error)
        answer.headers["Content-Range"] = f"bytes */{size}"
        return answer
    start, end = part or (0, size)
    if part:
        out["Content-Range"] = f"bytes {start}-{end - 1}/{size}"
    out["Content-Length"] = str(end - start)
    status = 206 if part else 200
    if request.method == "HEAD":
        return Response(status_code=status, headers=out)
    return StreamingResponse(reader(start, end), status_code=status, headers=out)
