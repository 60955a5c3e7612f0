"""Read-only routes that the inspector needs beside the service's own: channels, artifacts, tasks and series."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Query, Response
from pydantic_core import to_json

from sync.asgi import error_json
from sync.errors import ConfigError, DeltawireError, InvalidRequest, Pruned
from sync.schema.artifacts import ARTIFACT_CHANNELS, parse_artifact
from sync.stores import open_store
from sync.tools.log import log
from sync.tools.show import show

from .archive import Archive

MAX_READING = 8
"""Requests of these routes that are answered at once."""
SECONDS = 30.0
"""Deadline of one answer; a bucket may be slow."""
MAX_VERSIONS = 500
RunName = Annotated[str, Query(min_length=1, max_length=128)]


class Readings:
    """Reads in threads, at most `most` at once, each within `seconds`; errors become our error shape."""

    def __init__(self, folder: Path, most: int = MAX_READING, seconds: float = SECONDS) -> None:
        self._folder, self._most, self._limit = folder, most, seconds
        self._reading = 0

    async def channels(self, run: RunName, limit: Annotated[int, Query(ge=1, le=MAX_VERSIONS)] = 50) -> Response:
        """The newest versions of every channel of the run's `artifacts` URL, with their manifests' facts."""
        return await self._answer(lambda: log(self._store(run), limit=limit, long=True))

    async def artifact(
        self, run: RunName, channel: Annotated[str, Query(max_length=32)],
        version: Annotated[str, Query(min_length=1, max_length=64)],
    ) -> Response:  # fmt: skip
        """One version of an artifact channel: {channel, version, manifest, document}."""
        if channel not in ARTIFACT_CHANNELS:
            known = ", ".join(ARTIFACT_CHANNELS)
            raise InvalidRequest(f"channel: {channel!r} has no documents; those that have: {known}")
        return await self._answer(lambda: self._document(run, channel, version))

    async def tasks(self) -> Response:
        """Counts, mean reward and success share of every task with stored rollouts."""
        return await self._answer(lambda: {"tasks": self._with(Archive.tasks)})

    async def series(
        self,
        run: Annotated[str | None, Query(max_length=128)] = None,
        windows: Annotated[int, Query(ge=1, le=500)] = 60,
    ) -> Response:
        """Per run: rewards, statuses, lag, tokens and seconds per stage in windows of the stored rollouts."""
        return await self._answer(lambda: {"runs": self._with(lambda a: a.series(run or None, windows))})

    async def group(self, name: RunName) -> Response:
        """The ids of one group's rollouts, in order."""
        return await self._answer(lambda: {"rollouts": self._with(lambda a: a.group(name))})

    def _with(self, read: Callable[[Archive], Any]) -> Any:
        archive = Archive(self._folder)
        try:
            return read(archive)
        finally:
            archive.close()

    def _store(self, run: str) -> Any:
        requests = {stored.request.name: stored.request for stored in self._with(Archive.runs)}
        if run not in requests:
            known = ", ".join(requests) or "none"
            raise InvalidRequest(f"run: {run!r} is unknown; known: {known}", status=404, code="unknown_run")
        url = requests[run].artifacts
        if url is None:
            text = f"run {run!r} names no `artifacts` URL, so it has no channels; start one that does"
            raise InvalidRequest(text, status=404, code="no_artifacts")
        return open_store(url)

    def _document(self, run: str, channel: str, version: str) -> dict[str, Any]:
        found = show(self._store(run), version, channel)
        if "document" not in found:
            raise InvalidRequest(f"version: {version!r} is no version such as 3 or 3@1")
        content = found["content"]
        document = parse_artifact(channel, to_json(found["document"]), found["key"])
        return {
            "channel": channel, "version": f"{content['version']}@{content['epoch']}", "manifest": content,
            "document": document.model_dump(mode="json"),
        }  # fmt: skip

    async def _answer(self, read: Callable[[], Any]) -> Response:
        if self._reading >= self._most:
            text = f"{self._reading} such requests are answered already; ask again in a moment"
            raise InvalidRequest(text, status=429, code="overloaded")
        self._reading += 1
        task = asyncio.ensure_future(asyncio.to_thread(read))
        task.add_done_callback(self._done)  # the thread may outlive our answer, and counts until it ends
        try:
            async with asyncio.timeout(self._limit):
                return Response(to_json(await asyncio.shield(task)), media_type="application/json")
        except TimeoutError:
            return _error(504, "too_slow", f"the database or the bucket did not answer within {self._limit:g} s")
        except InvalidRequest:
            raise
        except (ConfigError, Pruned) as error:
            raise InvalidRequest(str(error), status=404, code="not_found") from None
        except DeltawireError as error:
            return _error(502, "bucket_unreadable", str(error))

    def _done(self, task: asyncio.Future[Any]) -> None:
        self._reading -= 1
        if not task.cancelled():
            task.exception()  # whoever waited has it


def _error(status: int, code: str, text: str) -> Response:
    return Response(error_json(code, text), status, media_type="application/json")


def reading_router(folder: Path) -> APIRouter:
    """The routes over the rollout database in `folder`."""
    readings, router = Readings(folder), APIRouter()
    router.add_api_route("/v1/channels", readings.channels, methods=["GET"])
    router.add_api_route("/v1/artifacts", readings.artifact, methods=["GET"])
    router.add_api_route("/v1/summary", readings.tasks, methods=["GET"])
    router.add_api_route("/v1/series", readings.series, methods=["GET"])
    router.add_api_route("/v1/group", readings.group, methods=["GET"])
    return router
