"""The HTTP face of the inference Space: native calls, scores, sync state, and OpenAI's chat completions."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel, ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from sync.asgi import App, Guard
from sync.errors import DeltawireError, InvalidRequest, PeerUnavailable, RejectError, StopError
from sync.schema.calls import (
    CallResult,
    ErrorBody,
    ErrorResponse,
    GenerateCall,
    GenerateRequest,
    GenerateResponse,
    ScoreRequest,
    ScoreResponse,
    SyncStatus,
)
from sync.session_keys import session_of

from .answers import error_of, text_of_generation
from .completions import CompletionRequest, completion_answer, completion_calls, completion_events
from .engines.base import Call, Engine, Generation
from .gateway import chat, messages
from .gateway.replies import MODEL, refusal, unknown_model
from .gateway.routes import add_gateway_routes, opened_by_session, refusal_body
from .gateway.service import Gateway
from .gateway.sessions import SessionLimits, Sessions
from .metrics import CONTENT_TYPE, exposition
from .render import render
from .waiting import ClientGoneError, late, only, settle

_KNOWN = (
    "GET /health /ready /metrics /sync/status /v1/models /v1/sessions, POST /sync/poke /v1/generate /v1/score "
    "/v1/completions /v1/chat/completions /v1/responses /v1/messages /v1/messages/count_tokens /v1/sessions, "
    "GET DELETE /v1/sessions/{id}"
)
M = TypeVar("M", bound=BaseModel)
T = TypeVar("T")


class Following(Protocol):
    """What the app asks of the follower (see `sync.follower.Follower`)."""

    def status(self) -> SyncStatus:
        """What the follower holds."""

    def poke(self) -> None:
        """Look at the head now."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of the app: a body's bytes, a request's seconds, and the gateway's own."""

    max_body_bytes: int = 16 << 20
    request_seconds: float = 300.0
    ping_seconds: float = 5.0
    sessions: SessionLimits = field(default_factory=SessionLimits)


def create_app(
    engine: Engine,
    follower: Following,
    *,
    token: str,
    limits: Limits = Limits(),
    on_start: Callable[[], None] = lambda: None,
) -> App:
    """The ASGI app of one Space, behind the token guard. `on_start` runs once requests are answered."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        on_start()
        yield

    app = FastAPI(title="Deltawire inference", docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan)
    sessions = Sessions(token, limits.sessions)
    routes = _Routes(engine, follower, limits.request_seconds, sessions.counts)
    app.get("/health")(routes.health)
    app.get("/ready")(routes.ready)
    app.get("/sync/status")(routes.sync_status)
    app.post("/sync/poke")(routes.poke)
    app.get("/metrics")(routes.metrics)
    app.post("/v1/generate")(routes.generate)
    app.post("/v1/score")(routes.score)
    app.post("/v1/completions")(routes.completions)
    app.get("/v1/models")(routes.models)
    app.get("/v1/models/{name:path}")(routes.model)
    gateway = Gateway(engine, sessions, limits.request_seconds, limits.ping_seconds, routes.require_ready)
    add_gateway_routes(app, gateway)
    app.add_exception_handler(DeltawireError, _on_error)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(ClientGoneError, _on_gone)
    app.add_exception_handler(ClientDisconnect, _on_gone)
    app.add_exception_handler(Exception, _on_bug)
    return Guard(
        app,
        token=token,
        max_body=limits.max_body_bytes,
        public=frozenset({"/health"}),
        sessions=lambda key: session_of(token, key),
        keyed=opened_by_session,
        refusal=refusal_body,
    )


class _Routes:
    def __init__(
        self, engine: Engine, follower: Following, request_seconds: float, counted: Callable[[], dict[str, int]]
    ) -> None:
        self.counted = counted
        self._engine = engine
        self._follower = follower
        self._seconds = request_seconds

    async def health(self) -> dict[str, str]:
        """The process is alive; says nothing about weights."""
        return {"status": "alive"}

    async def ready(self) -> Response:
        """200 when calls can be answered, else 503 with the reason."""
        self.require_ready()
        return JSONResponse({"status": "ready", "version": self._follower.status().version})

    async def sync_status(self) -> Response:
        """SyncStatus, with the engine's counters and its ways."""
        return _json(self._status())

    async def metrics(self) -> Response:
        """The numbers of the status for Prometheus."""
        return Response(exposition(self._status(), self.counted()), media_type=CONTENT_TYPE)

    def _status(self) -> SyncStatus:
        more = {"engine": self._engine.status(), "ways": self._engine.ways()}
        status = self._follower.status().model_copy(update=more)
        if status.ready and self._engine.failure:
            status = status.model_copy(update={"ready": False, "reason": self._engine.failure})
        return status

    async def poke(self) -> dict[str, str]:
        """A hint to look at the head now."""
        self._follower.poke()
        return {"status": "poked"}

    async def models(self) -> dict[str, Any]:
        """OpenAI's and Anthropic's list of models in one: the policy alone."""
        model = self._model(MODEL)
        ends = {"first_id": model["id"], "last_id": model["id"], "has_more": False}
        return {"object": "list", "data": [model], **ends}

    async def model(self, request: Request, name: str) -> Response:
        """The policy; a session answers to any name, as its calls do."""
        if name != MODEL and "deltawire_session" not in request.scope:
            return refusal(messages if "anthropic-version" in request.headers else chat, unknown_model(name))
        return JSONResponse(self._model(name))

    def _model(self, name: str) -> dict[str, Any]:
        version = self._follower.status().version
        shown = {"id": name, "display_name": name, "object": "model", "type": "model", "owned_by": "deltawire"}
        age = {"created": 0, "created_at": "1970-01-01T00:00:00Z"}
        return {**shown, **age, "max_model_len": self._engine.max_len, "weight_version": version}

    async def generate(self, request: Request) -> Response:
        """GenerateRequest → GenerateResponse; a call that fails carries its own error."""
        self.require_ready()
        body = _parse(GenerateRequest, await request.body())
        rendered = await run_in_threadpool(self._render, body.calls)
        prompts = [(call, ids) for call, ids in zip(body.calls, rendered, strict=True) if isinstance(ids, list)]
        futures = self._engine.generate([Call(ids, call.sampling) for call, ids in prompts])
        await settle(request, futures, self._seconds)
        pending = iter(futures)
        results = [
            self._result(call, ids, next(pending)) if isinstance(ids, list) else CallResult(id=call.id, error=ids)
            for call, ids in zip(body.calls, rendered, strict=True)
        ]
        return _json(GenerateResponse(calls=tuple(results)))

    async def score(self, request: Request) -> Response:
        """ScoreRequest → ScoreResponse, all under one version."""
        self.require_ready()
        body = _parse(ScoreRequest, await request.body())
        scores = await only(request, self._engine.score(body.sequences, body.temperature), self._seconds)
        logprobs = tuple(tuple(values) for values in scores.logprobs)
        return _json(ScoreResponse(version=str(scores.identity), logprobs=logprobs))

    async def completions(self, request: Request) -> Response:
        """vLLM's and OpenAI's completions: ids or text in, ids and text out; errors in OpenAI's form."""
        try:
            body = _parse(CompletionRequest, await request.body())
            self.require_ready()
            if body.model != MODEL:
                raise unknown_model(body.model)
            tokenizer = self._engine.tokenizer
            calls = await run_in_threadpool(completion_calls, body, tokenizer, seeds=self._engine.seeds)
            futures = self._engine.generate(calls)
            await settle(request, futures, self._seconds)
            if any(future.cancelled() for future in futures):
                raise late(self._seconds)
            made = [future.result() for future in futures]
        except DeltawireError as error:
            return refusal(chat, error)
        answer = completion_answer(body, calls, made, tokenizer)
        if not body.stream:
            return JSONResponse(answer)
        return StreamingResponse(completion_events(answer), media_type="text/event-stream")

    def require_ready(self) -> None:
        if self._engine.failure:
            raise StopError(self._engine.failure)
        status = self._follower.status()
        if not status.ready:
            raise PeerUnavailable(
                f"not ready: {status.reason or status.last_error or 'no weights yet'}; see /sync/status"
            )

    def _render(self, calls: Sequence[GenerateCall]) -> list[list[int] | ErrorBody]:
        tokenizer = self._engine.tokenizer
        found: list[list[int] | ErrorBody] = []
        for call in calls:
            try:
                found.append(render(tokenizer, call.prefix_ids, call.messages))
            except RejectError as error:
                found.append(_body(error))
        return found

    def _result(self, call: GenerateCall, ids: list[int], future: Future[Generation]) -> CallResult:
        if future.cancelled():
            return CallResult(id=call.id, prompt_ids=tuple(ids), error=_body(late(self._seconds)))
        error = future.exception()
        if isinstance(error, DeltawireError):
            return CallResult(id=call.id, prompt_ids=tuple(ids), error=_body(error))
        made = future.result()
        return CallResult.model_validate({
            "id": call.id,
            "prompt_ids": ids,
            "output_ids": made.output_ids,
            "logprobs": made.logprobs,
            "weight_versions": made.spans,
            "finish_reason": made.finish_reason,
            "text": text_of_generation(self._engine.tokenizer, made),
        })  # fmt: skip


def _parse(model: type[M], data: bytes) -> M:
    try:
        return model.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(p) for p in first["loc"]) or "body"
        raise InvalidRequest(f"{where}: {first['msg']}") from None


def _json(model: BaseModel) -> Response:
    return Response(model.model_dump_json(), media_type="application/json")


def _body(error: DeltawireError) -> ErrorBody:
    _, code, message = error_of(error)
    return ErrorBody(code=code, message=message)


async def _on_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, DeltawireError)
    return JSONResponse(ErrorResponse(error=_body(error)).model_dump(), error_of(error)[0])


async def _on_http(_: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    code = {404: "not_found", 405: "method_not_allowed"}.get(status, "http_error")
    message = f"{getattr(error, 'detail', error)}; known: {_KNOWN}"
    return JSONResponse(ErrorResponse(error=ErrorBody(code=code, message=message)).model_dump(), status)


async def _on_gone(_: Request, __: Exception) -> Response:
    return Response(status_code=499)


async def _on_bug(_: Request, error: Exception) -> Response:
    return JSONResponse(ErrorResponse(error=_bug(error)).model_dump(), 500)


def _bug(error: Exception) -> ErrorBody:
    return ErrorBody(code="internal", message=f"{type(error).__name__}: a defect of this server; see its log")
