"""The ASGI app of an environment Space: routes behind the guard, the service in its lifespan, the inspector at /."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from sync.asgi import Guard, error_json
from sync.errors import InvalidRequest, PeerUnavailable, StoreUnavailable

from .config import EnvConfig
from .openenv.space import OpenEnvSpace
from .service.channels import reading_router
from .service.routes import count_refused, make_router
from .service.service import RolloutService


def create_app(config: EnvConfig, token: str, url: str | None = None) -> Guard:
    """The app, ready to be served; it rolls while its lifespan lasts.

    `url` is where the inspector reaches this process (default: host and port of `config`). Opens the folder at once:
    raises ConfigError when it is unusable or in use.
    """
    service = RolloutService(config, token)
    openenv = OpenEnvSpace(config.openenv, config.threads)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await service.start()
        try:
            async with openenv.running():
                yield
        finally:
            await service.close()

    app = FastAPI(title="Deltawire environment Space", lifespan=lifespan, docs_url=None, redoc_url=None)
    router, routes = make_router(service)
    app.include_router(router)
    app.include_router(reading_router(config.folder))
    _answer_errors(app, service)
    if config.inspector:
        from .ui.inspector import mount

        app = mount(app, url or f"http://{config.host}:{config.port}", token)
    routes.guard = Guard(openenv.behind(app), token=token, max_body=config.max_body_bytes)
    return routes.guard


def _answer_errors(app: FastAPI, service: RolloutService) -> None:
    async def invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        first: dict[str, Any] = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"] if part not in ("body", "query", "path"))
        count_refused(service, request)
        return _error(400, "invalid_request", f"{where or 'body'}: {first['msg']}")

    async def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, InvalidRequest)
        count_refused(service, request)
        return _error(error.status, error.code, str(error))

    async def unavailable(_: Request, error: Exception) -> Response:
        return _error(503, "disk_failed", str(error))

    async def away(_: Request, error: Exception) -> Response:
        return _error(503, "peer_unavailable", str(error))

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        count_refused(service, request)
        text = f"{request.method} {request.url.path}: {error.detail}"
        return _error(error.status_code, "http_error", text, error.headers)

    async def internal(_: Request, error: Exception) -> Response:
        return _error(500, "internal", f"{type(error).__name__}; the log of the environment Space has the details")

    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(InvalidRequest, refused)
    app.add_exception_handler(StoreUnavailable, unavailable)
    app.add_exception_handler(PeerUnavailable, away)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(Exception, internal)


def _error(status: int, code: str, message: str, headers: Any = None) -> Response:
    return Response(error_json(code, message), status, headers, "application/json")
