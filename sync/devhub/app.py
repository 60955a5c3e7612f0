"""The Hub as one ASGI app: what it consists of (`Hub`), and the routes of all parts in their order (`build`)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Mount, Route

from ..asgi import App
from .auth import Auth, Caller
from .database import Database
from .faults import Faults
from .origin import OriginGuard
from .requestlog import RequestLog
from .responses import HubError, base_url, error_response

if TYPE_CHECKING:
    from .blobs import Blobs
    from .buckets import Buckets
    from .xet.cas import Cas


@dataclass(frozen=True)
class Options:
    """What the command line decides.

    `page_size`: entries per page of a listing. `cdn_port`: redirect file contents to this port, as the real Hub does.
    `grants`: offer upload grants. `control`: serve /_faults and /_log. `public_url`: the endpoint as clients reach it,
    where the Host header does not say so. `history_seconds`: how long the changes of buckets are remembered.
    """

    page_size: int = 1000
    cdn_port: int | None = None
    grants: bool = True
    control: bool = False
    public_url: str | None = None
    history_seconds: float = 3600.0


@dataclass
class Hub:
    """Everything that routes need. `stopping()` turns true when the server ends: endless answers must end then.

    `repo_readable(caller, type, id)`: whether that repository exists and may be read; set by its routes.
    """

    folder: Path
    db: Database
    cas: Cas
    blobs: Blobs
    auth: Auth
    faults: Faults
    log: RequestLog
    buckets: Buckets
    options: Options = field(default_factory=Options)
    stopping: Callable[[], bool] = lambda: False
    repo_readable: Callable[[Caller, str, str], bool] = lambda _caller, _type, _id: True

    def caller(self, request: Request) -> Caller:
        """Who sent `request`; raises HubError 401 for an unknown token."""
        return self.auth.caller(request)

    def base_url(self, request: Request) -> str:
        """The endpoint as this client reaches it."""
        return base_url(request, self.options.public_url)


def build(hub: Hub, on_start: Callable[[], None] = lambda: None) -> App:
    """The app of a Hub, with its guard, its faults and its request log around it.

    Order of routes: control, contents (/xet), buckets, repositories, Spaces, web page. `POST /api/repos/move` belongs
    to the repositories, which hand type `bucket` on to `bucket_routes.move`. `on_start` is called once it serves.
    """
    from . import bucket_routes, cdn, control, page, repo_routes, spaces
    from .xet.routes import cas_routes

    contents = cas_routes(hub.cas, hub.auth.allowed, hub.base_url, hub.options.grants)
    routes: list[BaseRoute] = [
        Route("/api/whoami-v2", _whoami, methods=["GET"]),
        Route("/v1/telemetry", _nothing, methods=["POST"]),
        *control.routes(hub),
        *cdn.routes(hub),
        Mount("/xet", routes=contents),
        *bucket_routes.routes(hub),
        *repo_routes.routes(hub),
        *spaces.routes(hub),
        *page.routes(hub),
    ]

    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        on_start()
        yield

    handlers = {HubError: _answer_error, 404: _answer_404, ClientDisconnect: _client_left}
    app = Starlette(routes=routes, exception_handlers=handlers, lifespan=lifespan)
    app.router.redirect_slashes = False
    app.state.hub = hub
    guarded = OriginGuard(app, check_host=hub.auth.open, public_url=hub.options.public_url)
    return hub.log.middleware(hub.faults.middleware(guarded))


def xet_token_response(hub: Hub, request: Request, *, write: bool) -> Response:
    """The answer of every xet-read-token and xet-write-token route, after the caller's right was checked."""
    token, expiry = hub.auth.issue(write=write)
    url = f"{hub.base_url(request)}/xet"
    headers = {"X-Xet-Cas-Url": url, "X-Xet-Access-Token": token, "X-Xet-Token-Expiration": str(expiry)}
    return JSONResponse({"casUrl": url, "exp": expiry, "accessToken": token}, headers=headers)


def _whoami(request: Request) -> Response:
    hub: Hub = request.app.state.hub
    caller = hub.caller(request)
    if caller.role == "anonymous":
        raise HubError(401, "Invalid username or password: send a token")
    token = {"displayName": caller.name, "role": caller.role, "createdAt": "1970-01-01T00:00:00.000Z"}
    body = {
        "type": "user", "id": caller.name, "name": caller.name, "fullname": caller.name, "isPro": False, "orgs": [],
        "auth": {"type": "access_token", "accessToken": token},
    }  # fmt: skip
    return JSONResponse(body)


def _answer_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, HubError)
    return error_response(error)


def _client_left(_request: Request, _error: Exception) -> Response:
    return Response(status_code=400)  # nobody reads it: the client went away before its request was whole


def _nothing(_request: Request) -> Response:
    return Response(status_code=200)


def _answer_404(request: Request, _error: Exception) -> Response:
    return error_response(HubError(404, f"no such route: {request.method} {request.url.path}"))
