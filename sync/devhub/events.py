"""The event stream of a bucket: every change as it is applied, for clients that follow instead of listing again."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import defaultdict
from collections.abc import AsyncIterator
from datetime import datetime
from typing import TYPE_CHECKING, Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from .buckets import Bucket, Change
from .responses import HubError, iso

if TYPE_CHECKING:
    from .app import Hub

PING_SECONDS = 15.0
LOOK_SECONDS = 0.5
BATCH = 1000


class Bell:
    """Wakes the streams of a bucket when it changed. `ring` may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: defaultdict[int, set[tuple[asyncio.AbstractEventLoop, asyncio.Event]]] = defaultdict(set)

    def ring(self, key: int) -> None:
        """Wake everybody who waits for the bucket `key`."""
        with self._lock:
            for loop, event in self._waiting.get(key, ()):
                loop.call_soon_threadsafe(event.set)

    def join(self, key: int) -> asyncio.Event:
        """An event that is set at every change from now on; leave with `leave`."""
        event = asyncio.Event()
        with self._lock:
            self._waiting[key].add((asyncio.get_running_loop(), event))
        return event

    def leave(self, key: int, event: asyncio.Event) -> None:
        """Stop waking `event`."""
        with self._lock:
            self._waiting[key].discard((asyncio.get_running_loop(), event))
            if not self._waiting[key]:
                del self._waiting[key]


def starting_point(bucket: Bucket, request: Request, oldest: int) -> tuple[int, int] | None:
    """(change number, time) after which to replay, from the query; None: that is further back than is remembered.

    `oldest`: the time before which changes may be forgotten. Raises HubError 400 for what cannot be read.
    """
    cursor, since = request.query_params.get("cursor"), request.query_params.get("since")
    if cursor is not None:
        if not cursor.isascii() or not cursor.isdigit() or len(cursor) > 18:
            raise HubError(400, "cursor is not one that this Hub gave")
        return None if int(cursor) < bucket.pruned else (int(cursor), 0)
    if since is not None:
        try:
            moment = round(datetime.fromisoformat(since).timestamp() * 1000)
        except (ValueError, OverflowError):
            raise HubError(400, f"since is {since!r}, expected an ISO 8601 time") from None
        lost = moment < oldest and moment < bucket.updated and bucket.pruned > 0
        return None if lost else (0, moment)
    return -1, 0


def stream(hub: Hub, bell: Bell, bucket: Bucket, request: Request, oldest: int) -> Response:
    """Answer GET …/events as server-sent events: replay, `ready`, then changes until either side ends."""
    start = starting_point(bucket, request, oldest)
    headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    return StreamingResponse(_follow(hub, bell, bucket, start), media_type="text/event-stream", headers=headers)


async def _follow(hub: Hub, bell: Bell, bucket: Bucket, start: tuple[int, int] | None) -> AsyncIterator[str]:
    if start is None:
        yield _event("reset", {"reason": "the changes since then are forgotten; list again"})
        return
    event = bell.join(bucket.key)
    try:
        after, since = start
        last = await run_in_threadpool(hub.buckets.last_change, bucket)
        if after < 0:
            after = last
        while changes := await run_in_threadpool(hub.buckets.changes, bucket, after=after, since=since, limit=BATCH):
            after = changes[-1].seq
            yield _changes(changes)
        after, since = max(after, last), 0
        yield _event("ready", {"cursor": str(after)})
        async for piece in _live(hub, bucket, event, after):
            yield piece
    finally:
        bell.leave(bucket.key, event)


async def _live(hub: Hub, bucket: Bucket, event: asyncio.Event, after: int) -> AsyncIterator[str]:
    idle = 0.0
    while not hub.stopping():
        try:
            await asyncio.wait_for(event.wait(), LOOK_SECONDS)
        except TimeoutError:
            idle += LOOK_SECONDS
            if idle >= PING_SECONDS:
                idle = 0.0
                yield ": ping\n\n"
            continue
        event.clear()
        while changes := await run_in_threadpool(hub.buckets.changes, bucket, after=after, limit=BATCH):
            after = changes[-1].seq
            yield _changes(changes)
        if not await run_in_threadpool(hub.buckets.alive, bucket):
            return
    yield _event("reconnect", {"cursor": str(after)})


def _changes(changes: list[Change]) -> str:
    return _event("changes", {"cursor": str(changes[-1].seq), "changes": [_described(c) for c in changes]})


def _described(change: Change) -> dict[str, Any]:
    out: dict[str, Any] = {"path": change.path, "op": change.op}
    if change.op != "delete":
        out |= {"size": change.size, "xetHash": change.hash, "uploadedAt": iso(change.at)}
        if change.mtime is not None:
            out["mtime"] = iso(change.mtime)
    return out


def _event(name: str, data: dict[str, Any]) -> str:
    return f"event: {name}\ndata: {json.dumps(data)}\n\n"
