"""The batch call of a bucket: lines of JSON, each an operation, applied in order; failed ones are named."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from .auth import Caller, may_read
from .buckets import Bucket, Failure, Operation
from .responses import HubError

if TYPE_CHECKING:
    from .app import Hub

MAX_LINE = 64 * 1024
MAX_BODY = 16 << 20
MAX_OPERATIONS = 10_000
MAX_TIME_MS = 253_402_300_799_999  # the end of the year 9999
_CONTENT_TYPE = re.compile(r"[A-Za-z0-9!#$&^_.+-]{1,100}/[A-Za-z0-9!#$&^_.+-]{1,100}(; ?[A-Za-z0-9=._ -]{1,100})?")
_REPO_TYPES = ("model", "dataset", "space")


async def answer(hub: Hub, request: Request, caller: Caller, bucket: Bucket) -> Response:
    """Read, apply and answer a batch, with the faults that strike it. The caller's right to write was checked.

    Status 422 when all operations failed. Raises HubError 400 or 413 before anything is applied.
    """
    operations: list[Operation] = []
    async for line in _lines(request):
        if len(operations) == MAX_OPERATIONS:
            raise HubError(413, f"more than {MAX_OPERATIONS} operations in one batch; split it")
        operations.append(_operation(line, len(operations) + 1))
    sources = {op.source for op in operations if op.source is not None}
    unreadable = {s for s in sources if not await run_in_threadpool(_readable, hub, caller, s)}
    path = request.url.path
    ready = [_struck(hub, path, _sourced(op, unreadable)) for op in operations]
    pause = hub.faults.seconds("slow_batch", request.method, path) if ready else None
    if pause is None:
        failures = await run_in_threadpool(hub.buckets.apply, bucket, ready)
    else:
        failures = []
        for operation in ready:
            failures += await run_in_threadpool(hub.buckets.apply, bucket, [operation])
            await asyncio.sleep(pause)
    return _answer(len(ready), failures)


async def _lines(request: Request) -> AsyncIterator[bytes]:
    rest, seen = b"", 0
    async for piece in request.stream():
        seen += len(piece)
        if seen > MAX_BODY:
            raise HubError(413, f"the batch is larger than {MAX_BODY} bytes; split it")
        *whole, rest = (rest + piece).split(b"\n")
        for line in whole:
            if line.strip():
                yield line
        if len(rest) > MAX_LINE:
            raise HubError(413, f"a line of the batch is longer than {MAX_LINE} bytes")
    if rest.strip():
        yield rest


def _operation(line: bytes, number: int) -> Operation:
    try:
        given = json.loads(line) if len(line) <= MAX_LINE else None
    except (ValueError, RecursionError):
        given = None
    if not isinstance(given, dict) or not isinstance(given.get("path"), str):
        raise HubError(400, f"line {number} of the batch is not a JSON object with a type and a path")
    kind, path = given.get("type"), given["path"]
    if kind == "deleteFile":
        return Operation("delete", path)
    if kind not in ("addFile", "copyFile"):
        expected = "addFile, copyFile or deleteFile"
        raise HubError(400, f"line {number} of the batch has the type {str(kind)[:40]!r}, expected {expected}")
    mtime, found, content_type = given.get("mtime"), given.get("xetHash"), given.get("contentType")
    if not isinstance(content_type, str) or not _CONTENT_TYPE.fullmatch(content_type):
        content_type = None
    source = None
    if kind == "copyFile":
        source = (str(given.get("sourceRepoType")), str(given.get("sourceRepoId")))
    put = Operation("put", path, found if isinstance(found, str) else "", content_type=content_type, source=source)
    if mtime is None or (type(mtime) is int and 0 <= mtime <= MAX_TIME_MS):
        return put._replace(mtime=mtime)
    return put._replace(error="mtime must be milliseconds since 1970")


def _readable(hub: Hub, caller: Caller, source: tuple[str, str]) -> bool:
    kind, name = source
    if kind in _REPO_TYPES:
        return hub.repo_readable(caller, kind, name)
    namespace, slash, rest = name.partition("/")
    if kind != "bucket" or not slash:
        return False
    try:
        bucket = hub.buckets.find(namespace, rest)
    except HubError:
        return False
    return may_read(caller, private=bucket.private, namespace=bucket.namespace)


def _sourced(operation: Operation, unreadable: set[tuple[str, str]]) -> Operation:
    source = operation.source
    if source in unreadable and source is not None:
        return operation._replace(error=f"the source {source[0]} {source[1]!r} was not found")
    return operation


def _struck(hub: Hub, path: str, operation: Operation) -> Operation:
    if hub.faults.hit(("fail_op",), "POST", path, operation=operation.path):
        return operation._replace(error="injected fault: fail_op")
    return operation


def _answer(processed: int, failures: list[Failure]) -> Response:
    body: dict[str, Any] = {
        "success": not failures,
        "processed": processed,
        "succeeded": processed - len(failures),
        "failed": [failure._asdict() for failure in failures],
    }
    status = 422 if failures and len(failures) == processed else 200
    text = json.dumps(body)  # escaped: a refused path may hold half a surrogate pair
    return Response(text, status_code=status, media_type="application/json")
