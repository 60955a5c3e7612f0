"""The gateway's routes: the dialects, and the sessions."""

from __future__ import annotations

import json

from fastapi import FastAPI, Request, Response
from pydantic import ValidationError
from starlette.concurrency import run_in_threadpool

from sync.errors import InvalidRequest
from sync.schema.sessions import SessionRequest

from . import chat, messages, responses
from .service import Gateway
from .sessions import trace

_PATHS = {
    "/v1/chat/completions": chat,
    "/v1/responses": responses,
    "/v1/messages": messages,
    "/v1/messages/count_tokens": messages,
}


def opened_by_session(path: str) -> bool:
    """Whether the key of a session opens this path: what an agent program calls, and nothing of its owner's."""
    return path in _PATHS or path in ("", "/", "/v1/models") or path.startswith("/v1/models/")


def refusal_body(path: str, status: int, code: str, message: str) -> bytes:
    """What the guard says of a request to `path`, in the shape that its client expects."""
    module = _PATHS.get(path)
    body = {"error": {"code": code, "message": message}} if module is None else module.error(status, code, message)
    return json.dumps(body).encode()


def add_gateway_routes(app: FastAPI, gateway: Gateway) -> None:
    """Add POST of each dialect, /v1/sessions, and the HEAD that some programs send to their base URL first."""

    async def chat_completions(request: Request) -> Response:
        return await gateway.call("chat", request)

    async def openai_responses(request: Request) -> Response:
        return await gateway.call("responses", request)

    async def anthropic_messages(request: Request) -> Response:
        return await gateway.call("messages", request)

    async def alive() -> Response:
        return Response()

    app.post("/v1/chat/completions")(chat_completions)
    app.post("/v1/responses")(openai_responses)
    app.post("/v1/messages")(anthropic_messages)
    app.post("/v1/messages/count_tokens")(gateway.count)
    app.head("/")(alive)
    routes = _Sessions(gateway)
    app.post("/v1/sessions")(routes.open)
    app.get("/v1/sessions")(routes.page)
    app.get("/v1/sessions/{name}")(routes.get)
    app.delete("/v1/sessions/{name}")(routes.delete)


class _Sessions:
    def __init__(self, gateway: Gateway) -> None:
        self._sessions = gateway.sessions

    async def open(self, request: Request) -> Response:
        """SessionRequest → SessionKey."""
        try:
            body = SessionRequest.model_validate_json(await request.body() or b"{}")
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(str(p) for p in first["loc"]) or "body"
            raise InvalidRequest(f"{where}: {first['msg']}") from None
        return _json(self._sessions.open(body).model_dump_json())

    async def page(self) -> Response:
        """SessionPage."""
        return _json(self._sessions.page().model_dump_json())

    async def get(self, name: str) -> Response:
        """Session: calls, chains, findings."""
        session = self._sessions.get(name).copy()
        return _json(await run_in_threadpool(lambda: trace(session).model_dump_json()))

    async def delete(self, name: str) -> Response:
        """Forget the session; what the engine does for it is given up."""
        self._sessions.delete(name)
        return Response(status_code=204)


def _json(text: str) -> Response:
    return Response(text, media_type="application/json")
