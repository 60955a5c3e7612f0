"""`/_faults` and `/_log`: only with --control, only from this machine, only for admins where tokens are set."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from ..errors import ConfigError
from .faults import check_fault
from .origin import is_loopback
from .responses import HubError, read_body

if TYPE_CHECKING:
    from .app import Hub


def routes(hub: Hub) -> list[BaseRoute]:
    """GET, POST and DELETE /_faults, DELETE /_faults/N, GET and DELETE /_log; none without the option `control`."""
    if not hub.options.control:
        return []

    def check(request: Request) -> None:
        caller = hub.caller(request)
        local = request.client is not None and is_loopback(request.client.host)
        if not local or caller.role != "admin":
            raise HubError(403, "the control routes answer only admins, and only from the machine of the Hub")

    async def faults(request: Request) -> Response:
        check(request)
        if request.method == "POST":
            body = await read_body(request)
            try:
                given = json.loads(body)
                listed = given if isinstance(given, list) else [given]
                checked = [check_fault(one, json.dumps(one)) for one in listed]
            except (ValueError, ConfigError, RecursionError) as error:
                raise HubError(400, str(error)) from None
            return JSONResponse({"ids": [hub.faults.add(fault) for fault in checked]})
        if request.method == "DELETE":
            hub.faults.remove()
        return JSONResponse({"faults": hub.faults.shown()})

    async def one_fault(request: Request) -> Response:
        check(request)
        hub.faults.remove(int(request.path_params["number"]))
        return JSONResponse({"faults": hub.faults.shown()})

    async def log(request: Request) -> Response:
        check(request)
        if request.method == "DELETE":
            hub.log.clear()
        return JSONResponse(hub.log.shown())

    return [
        Route("/_faults", faults, methods=["GET", "POST", "DELETE"]),
        Route("/_faults/{number:int}", one_fault, methods=["DELETE"]),
        Route("/_log", log, methods=["GET", "DELETE"]),
    ]
