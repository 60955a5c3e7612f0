"""The HTTP face of the inference Space: native calls, scores, sync state, and OpenAI's chat completions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from typing import Any, Protocol, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from sync.asgi import App, Guard
from sync.errors import DeltawireError, InvalidRequest, PeerUnavailable, RejectError, RetryError, StopError
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

from .engines.base import Call, Engine, Generation
from .openai_chat import ChatRequest, chat_answer, chat_call, openai_error
from .render import render, text_of

_KNOWN = "GET /health /ready /sync/status /v1/models, POST /sync/poke /v1/generate /v1/score /v1/chat/completions"
M = TypeVar("M", bound=BaseModel)
T = TypeVar("T")


class Following(Protocol):
    """What the app asks of the follower (see `sync.follower.Follower`)."""

    def status(self) -> SyncStatus:
        """What the follower holds."""

    def poke(self) -> None:
        """Look at the head now."""


class ClientGoneError(Exception):
    """The caller closed its connection; nobody reads an answer."""


def create_app(
    engine: Engine,
    follower: Following,
    *,
    token: str,
    max_body_bytes: int = 16 << 20,
    request_seconds: float = 300.0,
    on_start: Callable[[], None] = lambda: None,
) -> App:
    """The ASGI app of one Space, behind the token guard. `on_start` runs once requests are answered."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        on_start()
        yield

    app = FastAPI(title="Deltawire inference", docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan)
    routes = _Routes(engine, follower, request_seconds)
    app.get("/health")(routes.health)
    app.get("/ready")(routes.ready)
    app.get("/sync/status")(routes.sync_status)
    app.post("/sync/poke")(routes.poke)
    app.post("/v1/generate")(routes.generate)
    app.post("/v1/score")(routes.score)
    app.get("/v1/models")(routes.models)
    app.post("/v1/chat/completions")(routes.chat)
    app.add_exception_handler(DeltawireError, _on_error)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(ClientGoneError, _on_gone)
    app.add_exception_handler(ClientDisconnect, _on_gone)
    app.add_exception_handler(Exception, _on_bug)
    return Guard(app, token=token, max_body=max_body_bytes, public=frozenset({"/health"}))


class _Routes:
    def __init__(self, engine: Engine, follower: Following, request_seconds: float) -> None:
        self._engine = engine
        self._follower = follower
        self._seconds = request_seconds

    async def health(self) -> dict[str, str]:
        """The process is alive; says nothing about weights."""
        return {"status": "alive"}

    async def ready(self) -> Response:
        """200 when calls can be answered, else 503 with the reason."""
        self._require_ready()
        return JSONResponse({"status": "ready", "version": self._follower.status().version})

    async def sync_status(self) -> Response:
        """SyncStatus, with the engine's counters."""
        status = self._follower.status().model_copy(update={"engine": self._engine.status()})
        if status.ready and self._engine.failure:
            status = status.model_copy(update={"ready": False, "reason": self._engine.failure})
        return _json(status)

    async def poke(self) -> dict[str, str]:
        """A hint to look at the head now."""
        self._follower.poke()
        return {"status": "poked"}

    async def models(self) -> dict[str, Any]:
        """OpenAI's list of models: one, the policy."""
        version = self._follower.status().version
        model = {
            "id": "policy",
            "object": "model",
            "created": 0,
            "owned_by": "deltawire",
            "weight_version": version,
        }
        return {"object": "list", "data": [model]}

    async def generate(self, request: Request) -> Response:
        """GenerateRequest → GenerateResponse; a call that fails carries its own error."""
        self._require_ready()
        body = _parse(GenerateRequest, await request.body())
        rendered = await run_in_threadpool(self._render, body.calls)
        prompts = [(call, ids) for call, ids in zip(body.calls, rendered, strict=True) if isinstance(ids, list)]
        futures = self._engine.generate([Call(ids, call.sampling) for call, ids in prompts])
        await self._settle(request, futures)
        pending = iter(futures)
        results = [
            self._result(call, ids, next(pending)) if isinstance(ids, list) else CallResult(id=call.id, error=ids)
            for call, ids in zip(body.calls, rendered, strict=True)
        ]
        return _json(GenerateResponse(calls=tuple(results)))

    async def score(self, request: Request) -> Response:
        """ScoreRequest → ScoreResponse, all under one version."""
        self._require_ready()
        body = _parse(ScoreRequest, await request.body())
        scores = await self._only(request, self._engine.score(body.sequences, body.temperature))
        logprobs = tuple(tuple(values) for values in scores.logprobs)
        return _json(ScoreResponse(version=str(scores.identity), logprobs=logprobs))

    async def chat(self, request: Request) -> Response:
        """OpenAI's chat completions, one choice, not streamed; errors in OpenAI's form."""
        try:
            self._require_ready()
            call = chat_call(_parse(ChatRequest, await request.body()), self._engine.max_len)
            tokenizer = self._engine.tokenizer
            ids = await run_in_threadpool(render, tokenizer, (), call.messages)
            generation = await self._only(request, self._engine.generate([Call(ids, call.sampling)])[0])
        except DeltawireError as error:
            status, body = _explain(error)
            return JSONResponse(openai_error(status, body), status)
        return JSONResponse(chat_answer(call, ids, generation, tokenizer))

    def _require_ready(self) -> None:
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
                found.append(_explain(error)[1])
        return found

    def _result(self, call: GenerateCall, ids: list[int], future: Future[Generation]) -> CallResult:
        if future.cancelled():
            return CallResult(id=call.id, prompt_ids=tuple(ids), error=_explain(self._late())[1])
        error = future.exception()
        if isinstance(error, DeltawireError):
            return CallResult(id=call.id, prompt_ids=tuple(ids), error=_explain(error)[1])
        made = future.result()
        return CallResult.model_validate({
            "id": call.id,
            "prompt_ids": ids,
            "output_ids": made.output_ids,
            "logprobs": made.logprobs,
            "weight_versions": made.spans,
            "finish_reason": made.finish_reason,
            "text": text_of(self._engine.tokenizer, made.output_ids, ended=made.finish_reason == "stop"),
        })  # fmt: skip

    async def _only(self, request: Request, future: Future[T]) -> T:
        await self._settle(request, [future])
        if future.cancelled():
            raise self._late()
        return future.result()

    def _late(self) -> InvalidRequest:
        text = f"not finished within {self._seconds:g} s (setting request_seconds); ask for less at once"
        return InvalidRequest(text, status=504, code="deadline")

    async def _settle(self, request: Request, futures: Sequence[Future[Any]]) -> None:
        """Wait until all futures are done; at the deadline cancel the rest, without a caller cancel all."""
        done = _all_done(futures)
        gone = asyncio.ensure_future(_disconnected(request))
        try:
            await asyncio.wait({done, gone}, timeout=self._seconds, return_when=asyncio.FIRST_COMPLETED)
            if gone.done() and not done.done():
                raise ClientGoneError
        finally:
            for future in futures:
                future.cancel()
            done.cancel()
            gone.cancel()


def _all_done(futures: Sequence[Future[Any]]) -> asyncio.Future[None]:
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


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _parse(model: type[M], data: bytes) -> M:
    try:
        return model.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(p) for p in first["loc"]) or "body"
        raise InvalidRequest(f"{where}: {first['msg']}") from None


def _json(model: BaseModel) -> Response:
    return Response(model.model_dump_json(), media_type="application/json")


def _explain(error: DeltawireError) -> tuple[int, ErrorBody]:
    """HTTP status and body of an error of ours."""
    if isinstance(error, InvalidRequest):
        return error.status, ErrorBody(code=error.code, message=str(error))
    if isinstance(error, RetryError):
        return 503, ErrorBody(code="not_ready", message=str(error))
    if isinstance(error, StopError):
        return 503, ErrorBody(code="engine_failed", message=str(error))
    return 500, ErrorBody(code="internal", message=str(error))


async def _on_error(_: Request, error: Exception) -> Response:
    status, body = _explain(error) if isinstance(error, DeltawireError) else (500, _bug(error))
    return JSONResponse(ErrorResponse(error=body).model_dump(), status)


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
