"""The inspector without a rollout service of its own: over a Space elsewhere, or over a saved folder, read only."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, TypeVar

from fastapi import FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError

from sync.asgi import Guard, error_json
from sync.errors import DeltawireError, InvalidRequest
from sync.schema.rollouts import RolloutStatus, RunInfo, ServiceStatus

from .service.archive import Archive
from .service.channels import reading_router
from .ui.inspector import mount

T = TypeVar("T")


def remote_app(url: str, token: str, key: str) -> Guard:
    """The page over the Space at `url`, which knows `token`; the page itself asks for `key`."""
    app = FastAPI(docs_url=None, redoc_url=None)
    app.add_api_route("/health", _health, methods=["GET"])
    return Guard(mount(app, url, token), token=key, max_body=1 << 20)


def folder_app(folder: Path, url: str, key: str) -> Guard:
    """The page over the rollout database in `folder`, with the routes that it reads.

    It answers under `url` and asks for `key`.
    Raises ConfigError where there is no database to read.
    """
    Archive(folder).close()
    app, saved = FastAPI(docs_url=None, redoc_url=None), _Saved(folder)
    add = app.add_api_route
    add("/health", _health, methods=["GET"])
    add("/v1/status", saved.status, methods=["GET"])
    add("/v1/environments", saved.environments, methods=["GET"])
    add("/v1/rollouts/recent", saved.recent, methods=["GET"])
    add("/v1/rollouts/{name}", saved.rollout, methods=["GET"])
    app.include_router(reading_router(folder))
    app.add_exception_handler(RequestValidationError, _refused)
    app.add_exception_handler(DeltawireError, _refused)
    return Guard(mount(app, url, key), token=key, max_body=1 << 20)


class _Saved:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    async def status(self) -> Response:
        return _json((await asyncio.to_thread(self._read, _status)).model_dump_json())

    async def environments(self) -> Response:
        return _json('{"environments":[]}')

    async def recent(
        self,
        run: Annotated[str | None, Query(max_length=128)] = None,
        status: RolloutStatus | None = None,
        offset: Annotated[int, Query(ge=0, le=2**31 - 1)] = 0,
        limit: Annotated[int, Query(ge=1, le=500)] = 50,
    ) -> Response:
        page = await asyncio.to_thread(self._read, lambda a: a.recent(run or None, status, offset, limit))
        return _json(page.model_dump_json())

    async def rollout(self, name: str) -> Response:
        found = await asyncio.to_thread(self._read, lambda a: a.rollout_json(name))
        if found is None:
            text = f"rollout {name[:128]!r} is not stored in {self._folder}; GET /v1/rollouts/recent has all"
            raise InvalidRequest(text, status=404, code="unknown_rollout")
        return _json(found)

    def _read(self, read: Callable[[Archive], T]) -> T:
        archive = Archive(self._folder)
        try:
            return read(archive)
        finally:
            archive.close()


def _status(archive: Archive) -> ServiceStatus:
    ready: dict[str, int] = {}
    for run, _, _ in archive.ready():
        ready[run] = ready.get(run, 0) + 1
    runs = tuple(
        RunInfo(
            name=stored.request.name,
            environment=stored.request.environment,
            purpose=f"{stored.request.purpose}, saved",
            groups_started=stored.cursor,
            groups_ready=ready.get(stored.request.name, 0),
            rollouts_done=archive.recent(stored.request.name, None, 0, 1).total,
        )
        for stored in archive.runs()
    )
    return ServiceStatus(boot_id="saved folder", started_at=0.0, environments=(), runs=runs)


async def _health() -> dict[str, str]:
    return {"status": "alive"}


async def _refused(_: Request, error: Exception) -> Response:
    if isinstance(error, InvalidRequest):
        return Response(error_json(error.code, str(error)), error.status, media_type="application/json")
    if isinstance(error, RequestValidationError):
        first = error.errors()[0]
        text = f"{'.'.join(map(str, first['loc'][1:]))}: {first['msg']}"
        return Response(error_json("invalid_request", text), 400, media_type="application/json")
    return Response(error_json("unreadable", str(error)), 503, media_type="application/json")


def _json(body: str | bytes) -> Response:
    return Response(body, media_type="application/json")
