"""The HTTP side of the store, as hf_xet calls it: dedup queries, xorbs (by grant or not), shards, reconstructions.

Every route wants an access token of the xet-token routes, but for two: the URLs to fetch a xorb and to use an upload
grant carry a signature instead, good for an hour, as clients call them without a token.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import hmac
import json
import os
import secrets
import sqlite3
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import BaseRoute, Route

from ...errors import InvalidRequest
from ..responses import HubError, parse_range, read_body, read_object
from . import formats, shards
from .cas import Cas
from .crc64 import file_crc64nvme
from .formats import hash_bytes, hash_hex
from .reconstruction import Plan, answer_v1, answer_v2

Allowed = Callable[[str, bool], bool]
PublicUrl = Callable[[Request], str]
Endpoint = Callable[["_Routes", Request], Awaitable[Response]]

URL_SECONDS = 3600
_WRITE_PIECE = 1 << 20
_MAX_TELEMETRY = 1 << 20


def cas_routes(cas: Cas, allowed: Allowed, public_url: PublicUrl, grants: bool = True) -> list[BaseRoute]:  # noqa: FBT001, FBT002 - the seam of app.build
    """The routes of a store; mount them anywhere, the URL of the mount is the `casUrl` of the xet tokens.

    `allowed(token, write)` says whether an access token is good. `public_url(request)` is the endpoint as this client
    reaches it, without the mount. `grants=False` answers 404 for upload grants, and clients send xorbs directly.
    """
    routes = _Routes(cas, allowed, public_url)
    on_grants = [Route("/v1/xorb-grants/{prefix}/{hash}", routes.grant, methods=["POST"])] if grants else []
    return [
        *on_grants,
        Route("/v1/chunks/{prefix}/{hash}", routes.chunk, methods=["GET"]),
        Route("/v1/xorb-commits/{prefix}/{hash}/grant/{grant}", routes.commit, methods=["POST"]),
        Route("/v1/xorbs/{prefix}/{hash}", routes.xorb, methods=["POST"]),
        Route("/v1/shards", routes.shard_v1, methods=["POST"]),
        Route("/v2/shards", routes.shard_v2, methods=["POST"]),
        Route("/v1/reconstructions/{hash}", routes.reconstruction_v1, methods=["GET"]),
        Route("/v2/reconstructions/{hash}", routes.reconstruction_v2, methods=["GET"]),
        Route("/v1/telemetry", routes.telemetry, methods=["POST"]),
        Route("/uploads/{hash}", routes.upload, methods=["PUT"]),
        Route("/xorbs/{hash}", routes.download, methods=["GET"]),
    ]


class XorbResponse(FileResponse):
    """A xorb or ranges of it. A request with very many ranges gets them all, not the whole file."""

    chunk_size = 1 << 20
    max_ranges = formats.MAX_CHUNKS


def _answering(endpoint: Endpoint) -> Endpoint:
    """Turn what goes wrong in an endpoint into the answer that tells the client what to do."""

    @functools.wraps(endpoint)
    async def answer(self: _Routes, request: Request) -> Response:
        try:
            return await endpoint(self, request)
        except InvalidRequest as error:
            raise HubError(error.status, str(error)) from None
        except ClientDisconnect:
            return Response(status_code=400)  # nobody reads it
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise _full() from None
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_FULL:
                raise
            raise _full() from None

    return answer


def _full() -> HubError:
    return HubError(507, "the disk of the Hub's --data folder is full; make room and try again")


class _Routes:
    def __init__(self, cas: Cas, allowed: Allowed, public_url: PublicUrl) -> None:
        self._cas = cas
        self._allowed = allowed
        self._public_url = public_url

    # Downloads

    @_answering
    async def chunk(self, request: Request) -> Response:
        await self._authorize(request, write=True)
        found = await run_in_threadpool(self._cas.find_chunk, request.path_params["hash"])
        if found is None:
            raise HubError(404, "no upload shared this chunk")
        return Response(found, media_type="application/octet-stream")

    @_answering
    async def reconstruction_v1(self, request: Request) -> Response:
        return await self._reconstruction(request, answer_v1)

    @_answering
    async def reconstruction_v2(self, request: Request) -> Response:
        return await self._reconstruction(request, answer_v2)

    async def _reconstruction(self, request: Request, answer: Callable[..., dict[str, Any]]) -> Response:
        await self._authorize(request, write=False)
        name = request.path_params["hash"]

        def urls(xorb: bytes) -> str:
            path = f"/xorbs/{hash_hex(xorb)}"
            return f"{self._base(request)}{path}?{self._signed('GET', path, {})}"

        def work() -> Response:
            size = self._cas.size(name)
            if size is None:
                raise HubError(404, f"no file {name} in the store")
            try:
                start, end = parse_range(request.headers.get("range"), size) or (0, size)
            except HubError as error:
                headers = {"Content-Range": f"bytes */{size}"}
                return JSONResponse({"error": error.message}, status_code=416, headers=headers)
            plan = self._cas.plan(name, start, end) if start < end else Plan(0, [])
            return JSONResponse(answer(plan, self._cas.layout, urls))

        return await run_in_threadpool(work)

    @_answering
    async def download(self, request: Request) -> Response:
        xorb = hash_bytes(request.path_params["hash"])
        self._check_signature(request, "GET", f"/xorbs/{hash_hex(xorb)}", ())
        if not await run_in_threadpool(self._cas.has_xorb, xorb):
            raise HubError(404, "no such xorb in the store")
        headers = {"Cache-Control": "private, immutable"}
        return XorbResponse(self._cas.xorb_path(xorb), media_type="application/octet-stream", headers=headers)

    # Uploads

    @_answering
    async def grant(self, request: Request) -> Response:
        await self._authorize(request, write=True)
        xorb = hash_bytes(request.path_params["hash"])
        facts = _grant_facts(await read_object(request))
        if await run_in_threadpool(self._cas.has_xorb, xorb):
            return JSONResponse({})
        path, number = f"/uploads/{hash_hex(xorb)}", secrets.token_hex(16)
        url = f"{self._base(request)}{path}?{self._signed('PUT', path, {'grant': number, **facts})}"
        return JSONResponse({"id": number, "method": "PUT", "url": url, "headers": {}}, status_code=201)

    @_answering
    async def upload(self, request: Request) -> Response:
        xorb = hash_bytes(request.path_params["hash"])
        self._check_signature(request, "PUT", f"/uploads/{hash_hex(xorb)}", ("grant", "length", "crc64nvme"))
        length, checksum = int(request.query_params["length"]), request.query_params["crc64nvme"]
        if not await self._store(request, xorb, length, checksum):
            raise HubError(412, "the xorb is stored already")
        return Response(status_code=200)

    @_answering
    async def commit(self, request: Request) -> Response:
        await self._authorize(request, write=True)
        if not await run_in_threadpool(self._cas.has_xorb, hash_bytes(request.path_params["hash"])):
            raise HubError(404, "nothing was uploaded with this grant; ask for another one")
        return JSONResponse({"was_inserted": True})

    @_answering
    async def xorb(self, request: Request) -> Response:
        await self._authorize(request, write=True)
        inserted = await self._store(request, hash_bytes(request.path_params["hash"]), None, "")
        return JSONResponse({"was_inserted": inserted})

    @_answering
    async def shard_v1(self, request: Request) -> Response:
        return JSONResponse({"result": int(await self._shard(request))})

    @_answering
    async def shard_v2(self, request: Request) -> Response:
        line = json.dumps({"type": "result", "result": int(await self._shard(request))})
        return Response(line + "\n", media_type="application/x-ndjson")

    async def _shard(self, request: Request) -> bool:
        await self._authorize(request, write=True)
        async with self._received(request, shards.MAX_BODY, None) as (_, path):
            return await run_in_threadpool(self._cas.add_shard, path)

    @_answering
    async def telemetry(self, request: Request) -> Response:
        await self._authorize(request, write=False)
        await read_body(request, _MAX_TELEMETRY)
        return JSONResponse({})

    async def _store(self, request: Request, xorb: bytes, length: int | None, checksum: str) -> bool:
        """Receive a xorb. False: it was there already; the body is read to its end all the same."""
        if await run_in_threadpool(self._cas.has_xorb, xorb):
            await _drain(request)
            return False
        async with self._received(request, formats.MAX_BODY, length) as (descriptor, path):

            def work() -> bool:
                if checksum and (found := file_crc64nvme(path)) != int(checksum):
                    raise InvalidRequest(
                        f"the body has the crc64nvme {found}, the grant says {checksum}; send it again"
                    )
                return self._cas.add_xorb(xorb, descriptor, path)

            return await run_in_threadpool(work)

    @asynccontextmanager
    async def _received(self, request: Request, limit: int, length: int | None) -> AsyncIterator[tuple[int, Path]]:
        """The body in a temporary file that is gone in the end. At most 1 MiB of it is in memory at once."""
        said = request.headers.get("content-length", "")
        if said.isdigit() and int(said) > limit:
            raise _too_large(limit)
        descriptor, path = await run_in_threadpool(self._cas.new_file)
        try:
            received, pending = 0, bytearray()
            async for piece in request.stream():
                received += len(piece)
                if received > limit:
                    raise _too_large(limit)
                pending += piece
                if len(pending) >= _WRITE_PIECE:
                    await run_in_threadpool(_write, descriptor, pending)
                    pending.clear()
            await run_in_threadpool(_write, descriptor, pending)
            if length is not None and received != length:
                raise InvalidRequest(f"the body has {received} bytes, the grant says {length}; send it again")
            yield descriptor, path
        finally:
            os.close(descriptor)
            path.unlink(missing_ok=True)

    # Tokens and signatures

    async def _authorize(self, request: Request, *, write: bool) -> None:
        """Raise HubError 401 for a token that is not good, and 403 for one that only reads; the body is read then."""
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and self._allowed(token.strip(), write):
            return
        await _drain(request)
        if scheme.lower() == "bearer" and write and self._allowed(token.strip(), False):  # noqa: FBT003 - as the seam has it
            raise HubError(403, "this access token may only read; ask the xet-write-token route for another one")
        raise HubError(401, "the access token is unknown or expired; ask the xet-token route for a new one")

    def _base(self, request: Request) -> str:
        return f"{self._public_url(request)}{request.scope.get('root_path', '')}"

    def _signed(self, method: str, path: str, facts: dict[str, str]) -> str:
        expiry = str(int(time.time()) + URL_SECONDS)
        return urlencode({**facts, "exp": expiry, "sig": self._mac(method, path, *facts.values(), expiry)})

    def _check_signature(self, request: Request, method: str, path: str, names: tuple[str, ...]) -> None:
        """Raise HubError 403 unless `_signed` gave this query, with facts of these names, within the hour."""
        query = request.query_params
        values = [query.get(name, "") for name in (*names, "exp")]
        good = hmac.compare_digest(query.get("sig", "").encode(), self._mac(method, path, *values).encode())
        if not good or int(values[-1]) < time.time():
            raise HubError(403, "the URL is not signed by this Hub, or expired; ask for another one")

    def _mac(self, *parts: str) -> str:
        return hmac.new(self._cas.secret, "\n".join(parts).encode(), hashlib.sha256).hexdigest()


def _grant_facts(body: dict[str, Any]) -> dict[str, str]:
    """What a grant is for: the length, and the checksum where it is one that this server takes (else empty)."""
    length, checksum = body.get("length"), body.get("checksum")
    if not isinstance(length, int) or length < 1:
        raise HubError(400, f"length is {length!r}, expected the bytes of the xorb")
    if length > formats.MAX_BODY:
        raise _too_large(formats.MAX_BODY)
    value = ""
    if isinstance(checksum, dict) and checksum.get("algo") == "crc64nvme":
        value = str(checksum.get("value"))
        if not value.isascii() or not value.isdigit() or len(value) > 20:
            raise HubError(400, f"the crc64nvme is {value[:40]!r}, expected a decimal number")
    return {"length": str(length), "crc64nvme": value}


def _too_large(limit: int) -> HubError:
    return HubError(413, f"the body is larger than {limit} bytes; send less at once")


async def _drain(request: Request) -> None:
    """Read the body and forget it, so that the client gets round to reading the answer."""
    received = 0
    async for piece in request.stream():
        received += len(piece)
        if received > formats.MAX_BODY:
            raise _too_large(formats.MAX_BODY)


def _write(descriptor: int, data: bytearray) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
