"""Waiting for the engine on behalf of a caller: until all is done, the deadline passes, or the caller goes away."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from fastapi import Request

from sync.errors import InvalidRequest

T = TypeVar("T")


class ClientGoneError(Exception):
    """The caller closed its connection; nobody reads an answer."""


def late(seconds: float) -> InvalidRequest:
    """The deadline passed."""
    text = f"not finished within {seconds:g} s (setting request_seconds); ask for less at once"
    return InvalidRequest(text, status=504, code="deadline")


async def settle(request: Request, futures: Sequence[Future[Any]], seconds: float) -> None:
    """Wait until all futures are done; at the deadline cancel the rest, without a caller cancel all.

    Raises ClientGoneError when the caller closed its connection. The body of `request` must have been read.
    """
    done = all_done(futures)
    gone = asyncio.ensure_future(disconnected(request))
    try:
        await asyncio.wait({done, gone}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if gone.done() and not done.done():
            raise ClientGoneError
    finally:
        for future in futures:
            future.cancel()
        done.cancel()
        gone.cancel()


async def only(request: Request, future: Future[T], seconds: float) -> T:
    """What the future gives. Raises as `settle`, InvalidRequest (504) at the deadline, and what the future holds."""
    await settle(request, [future], seconds)
    if future.cancelled():
        raise late(seconds)
    return future.result()


def all_done(futures: Sequence[Future[Any]]) -> asyncio.Future[None]:
    """A future of the running loop that is done when all of `futures` are, however they ended."""
    loop = asyncio.get_running_loop()
    found: asyncio.Future[None] = loop.create_future()
    left = len(futures)

    def count() -> None:
        nonlocal left
        left -= 1
        if left <= 0 and not found.done():
            found.set_result(None)

    for future in futures:
        future.add_done_callback(lambda _: loop.call_soon_threadsafe(count))
    if not futures:
        found.set_result(None)
    return found


async def disconnected(request: Request) -> None:
    """Return when the caller has closed its connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
