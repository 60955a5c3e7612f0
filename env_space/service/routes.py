"""The HTTP routes of an environment Space: parse, ask the service, answer JSON. Bodies: `sync/schema/rollouts.py`."""

from __future__ import annotations

import asyncio
from random import Random
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from pydantic_core import to_json

from sync.asgi import Guard
from sync.errors import InvalidRequest
from sync.schema.rollouts import MAX_ENVIRONMENT, AckRequest, RenewRequest, RolloutStatus, RunRequest

from ..environments import ENVIRONMENTS, Environment, environment
from .service import RolloutService

MAX_DEMONSTRATIONS = 10_000
RunName = Annotated[str, Query(min_length=1, max_length=128)]
EnvironmentName = Annotated[str, Query(alias="environment", min_length=1, max_length=MAX_ENVIRONMENT)]
Seed = Annotated[int, Query(ge=0, le=2**31 - 1)]


class _Routes:
    def __init__(self, service: RolloutService) -> None:
        self._service = service
        self.guard: Guard | None = None

    async def post_run(self, body: RunRequest) -> Response:
        return _json((await self._service.post_run(body)).model_dump_json())

    async def stop_run(self, name: str) -> Response:
        return _json((await self._service.stop_run(name)).model_dump_json())

    async def lease(
        self,
        request: Request,
        run: RunName,
        limit: Annotated[int, Query(ge=1, le=1_024)] = 16,
        wait: Annotated[float, Query(ge=0, le=30)] = 0.0,
    ) -> Response:
        return _json(await self._service.lease(run, limit, wait, request.is_disconnected))

    async def ack(self, body: AckRequest) -> Response:
        return _json(self._service.ack(body.groups).model_dump_json())

    async def renew(self, body: RenewRequest) -> Response:
        return _json(self._service.renew(body.groups).model_dump_json())

    async def recent(
        self,
        run: Annotated[str | None, Query(max_length=128)] = None,
        status: RolloutStatus | None = None,
        offset: Annotated[int, Query(ge=0, le=2**31 - 1)] = 0,
        limit: Annotated[int, Query(ge=1, le=500)] = 50,
    ) -> Response:
        return _json(self._service.store.recent(run or None, status, offset, limit).model_dump_json())

    async def rollout(self, name: str) -> Response:
        found = self._service.store.rollout_json(name)
        if found is None:
            raise InvalidRequest(
                f"rollout {name[:128]!r} is not stored here (setting keep_rollouts bounds how many stay); "
                "GET /v1/rollouts/recent lists those that are",
                status=404,
                code="unknown_rollout",
            )
        return _json(found)

    async def status(self) -> Response:
        refused = self.guard.refused if self.guard else 0
        return _json(self._service.status(refused).model_dump_json())

    async def tasks(self, name: EnvironmentName) -> Response:
        tasks = await asyncio.to_thread(environment(name).tasks)
        return _json(to_json({"environment": name, "tasks": tasks}))

    async def environments(self) -> Response:
        known = [_describe(cls) for _, cls in sorted(ENVIRONMENTS.items())]
        return _json(to_json({"environments": known}))

    async def demonstrations(
        self,
        name: EnvironmentName,
        count: Annotated[int, Query(ge=1, le=MAX_DEMONSTRATIONS)] = 100,
        seed: Seed = 0,
    ) -> Response:
        return _json(await asyncio.to_thread(_demonstrations, environment(name), count, seed))


def _describe(cls: type[Environment]) -> dict[str, Any]:
    about = (cls.__doc__ or "").strip().partition("\n")[0]
    return {"name": cls.name, "about": about, "max_turns": cls.max_turns, "tasks": len(cls.tasks())}


def _demonstrations(cls: type[Environment], count: int, seed: int) -> bytes:
    """`count` conversations, the task keys in turn, each from its own seed."""
    tasks = cls.tasks()
    talks = [cls().demonstrate(tasks[i % len(tasks)], Random(f"{seed}:{i}:demonstration")) for i in range(count)]
    return to_json({"conversations": talks})


def _json(body: str | bytes) -> Response:
    return Response(body, media_type="application/json")


async def _health() -> dict[str, str]:
    return {"status": "alive"}


def count_refused(service: RolloutService, request: Request) -> None:
    """Count a request that was answered 4xx (browsers ask for pages that are not there; only /v1 counts)."""
    if request.url.path.startswith("/v1/"):
        service.refused += 1


def make_router(service: RolloutService) -> tuple[APIRouter, _Routes]:
    """All routes; the second value takes the Guard in `guard` so that /v1/status can count what it refused."""
    routes, router = _Routes(service), APIRouter()
    add = router.add_api_route
    add("/health", _health, methods=["GET"])
    add("/v1/runs", routes.post_run, methods=["POST"])
    add("/v1/runs/{name}", routes.stop_run, methods=["DELETE"])
    add("/v1/rollouts", routes.lease, methods=["GET"])
    add("/v1/rollouts/ack", routes.ack, methods=["POST"])
    add("/v1/rollouts/renew", routes.renew, methods=["POST"])
    add("/v1/rollouts/recent", routes.recent, methods=["GET"])
    add("/v1/rollouts/{name}", routes.rollout, methods=["GET"])
    add("/v1/status", routes.status, methods=["GET"])
    add("/v1/tasks", routes.tasks, methods=["GET"])
    add("/v1/environments", routes.environments, methods=["GET"])
    add("/v1/demonstrations", routes.demonstrations, methods=["GET"])
    return router, routes
