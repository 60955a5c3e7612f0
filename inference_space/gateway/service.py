"""The gateway: a request in an agent's dialect becomes token ids, a call of the engine, a record, and an answer."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.concurrency import run_in_threadpool

from sync.errors import DeltawireError, InvalidRequest
from sync.schema.calls import Sampling
from sync.schema.sessions import CallRecord, Dialect, RecordedToolCall

from ..answers import error_of, text_of_generation
from ..engines.base import Call, Engine, Generation
from ..render import Prefix, opening_for, render_turns, takes_tools
from ..waiting import ClientGoneError, only
from . import chat, messages, responses
from .fields import short
from .linking import Linked, Place
from .parsing import Parser
from .replies import MODEL, DialectModule, Told, delivered, json_object, refusal, unknown_model
from .sessions import Entry, Open, Sessions, gone
from .turns import Answer, Asked, Finish, Tool, ToolCall, Turn

DIALECTS: dict[Dialect, DialectModule] = {"chat": chat, "responses": responses, "messages": messages}


@dataclass(slots=True)
class _Plan:
    """A request that is ready for the engine. `place` is None outside of sessions."""

    asked: Asked
    dialect: Dialect
    record: str
    started: float
    sampling: Sampling
    refused: dict[str, Any]
    findings: list[str]
    repeats: bool
    session: Open | None
    place: Place | None = None
    ids: list[int] | None = None
    opening: str = ""


class Gateway:
    """Answers requests; all methods run on the event loop. `require_ready` raises when no call can be answered now.

    A request must be done in `request_seconds`. A stream is silent for `ping_seconds` at most: an answer (or an error)
    that is ready by then comes at once, with its own status; else the stream is opened and kept alive at that interval.
    """

    def __init__(
        self,
        engine: Engine,
        sessions: Sessions,
        request_seconds: float,
        ping_seconds: float,
        require_ready: Callable[[], None],
    ) -> None:
        self.sessions = sessions
        self._engine, self._require_ready = engine, require_ready
        self._seconds, self._ping_seconds = request_seconds, ping_seconds
        self._parser: tuple[Any, Parser] | None = None
        self._tools_shown: tuple[Any, bool] | None = None

    async def call(self, dialect: Dialect, request: Request) -> Response:
        """Answer a request; every failure in the shape that the dialect's clients expect."""
        module = DIALECTS[dialect]
        try:
            session = self._session(request)
            plan = await self._planned(dialect, await request.body(), request.headers, session)
            future = self._begin(plan)
            if plan.asked.stream:
                return await self._stream(module, request, plan, future)
            with self._counted(plan, future):
                made = await only(request, future, self._seconds)
            answer, entry = self._answered(plan, made)
        except DeltawireError as error:
            return refusal(module, error)
        return Told(module.answer(plan.asked, answer), request, entry)

    async def count(self, request: Request) -> Response:
        """Anthropic's count_tokens: how many tokens the prompt would have."""
        try:
            session = self._session(request)
            body = json_object(await request.body())
            body.setdefault("max_tokens", 1)
            asked = messages.parse(body, request.headers)
            self._require_ready()
            plan = self._new(asked, "messages", session, repeats=False)
            await self._prompt(plan)
        except DeltawireError as error:
            return refusal(messages, error)
        return JSONResponse({"input_tokens": len(plan.ids or ())})

    # A request until the engine has it

    def _session(self, request: Request) -> Open | None:
        name = request.scope.get("deltawire_session")
        return None if name is None else self.sessions.get(name)

    async def _planned(self, dialect: Dialect, data: bytes, headers: Mapping[str, str], session: Open | None) -> _Plan:
        asked = DIALECTS[dialect].parse(json_object(data), headers)
        self._require_ready()
        if session is None and asked.model != MODEL:
            raise unknown_model(asked.model)
        if session is not None:
            self.sessions.admit(session)
        plan = self._new(asked, dialect, session, repeats=headers.get("x-stainless-retry-count", "0") not in ("", "0"))
        await self._prompt(plan)
        return plan

    def _new(self, asked: Asked, dialect: Dialect, session: Open | None, *, repeats: bool) -> _Plan:
        sampling, refused = self._sampling(asked, session)
        name = f"rec_{uuid.uuid4().hex}"
        return _Plan(
            asked, dialect, name, time.time(), sampling, refused, [f"not_used:{n}" for n in refused], repeats, session
        )

    def _sampling(self, asked: Asked, session: Open | None) -> tuple[Sampling, dict[str, Any]]:
        """What is used, and what of the asked is not. Outside of a session nobody would see the latter: refused."""
        refused = dict(asked.dropped)
        temperature, seed = asked.temperature, asked.seed
        most = self._engine.max_len
        if session is not None:
            most = min(most, session.request.max_tokens or most)
            if session.request.purpose == "training":
                if temperature not in (None, session.request.temperature):
                    refused["temperature"] = temperature
                temperature = None
            temperature = session.request.temperature if temperature is None else temperature
        drawn = session is not None and session.request.purpose == "training"
        if seed is not None and (drawn or not self._engine.seeds):
            refused["seed"] = seed
            seed = None
        if refused and session is None:
            name, value = next(iter(refused.items()))
            raise InvalidRequest(f"{name}: {short(value)} is not supported; leave it out", code="unsupported")
        return (
            Sampling(
                max_tokens=min(asked.limit or most, most),
                temperature=1.0 if temperature is None else temperature,
                seed=seed,
                stop=asked.stop,
            ),
            refused,
        )

    async def _prompt(self, plan: _Plan) -> None:
        """Render the prompt: behind the recorded ids of the call that it goes on from, else all of it."""
        tokenizer, asked = self._engine.tokenizer, plan.asked
        plan.place = plan.session.tree.find(asked) if plan.session is not None else None
        parent = plan.place.parent if plan.place is not None else None
        if plan.place is not None and parent is not None:
            prefix = Prefix(parent.ids, parent.said, parent.before)
            try:
                plan.ids = await run_in_threadpool(render_turns, tokenizer, plan.place.rest, asked.tools, prefix=prefix)
            except InvalidRequest as error:
                if error.code not in ("template_not_prefix_preserving", "template"):
                    raise
                parent = None
                plan.place = plan.place._replace(parent=None, rest=asked.turns, why=error.code)
        if parent is None:
            plan.ids = await run_in_threadpool(render_turns, tokenizer, asked.turns, asked.tools, prefix=None)
        if asked.tools and not await run_in_threadpool(self._shows_tools, tokenizer, asked.tools):
            plan.findings.append("tools_not_shown")
        if plan.place is not None and plan.place.why:
            plan.findings.append(f"fork:{plan.place.why}")
        if asked.choice == "required" or asked.choice.startswith("name:"):
            opening = opening_for(tokenizer, asked.choice)
            if opening is None:
                plan.findings.append("not_used:tool_choice")
            else:
                plan.opening = opening
                plan.ids = [*(plan.ids or ()), *tokenizer.encode(opening, add_special_tokens=False)]

    def _begin(self, plan: _Plan) -> Future[Generation]:
        return self._engine.generate([Call(plan.ids or (), plan.sampling)])[0]

    @contextmanager
    def _counted(self, plan: _Plan, future: Future[Generation]) -> Iterator[None]:
        """While the engine works on it, the call counts as active in its session; without a reader it is given up."""
        session = plan.session
        if session is not None:
            session.active.add(future)
        try:
            yield
        except ClientGoneError:
            if session is not None:
                session.findings["client_gone"] += 1
            raise
        except InvalidRequest:
            if session is not None and session.closed:
                raise gone(session.id) from None  # its deletion ended the call, not what the engine says
            raise
        finally:
            future.cancel()
            if session is not None:
                session.active.discard(future)

    # An answer

    def _answered(self, plan: _Plan, made: Generation) -> tuple[Answer, Entry | None]:
        """Parse what the engine made and record it. Raises InvalidRequest when the session was deleted meanwhile."""
        tokenizer, asked = self._engine.tokenizer, plan.asked
        text = text_of_generation(tokenizer, made)
        tools = asked.tools if asked.choice != "none" else ()
        parsed = self._parser_of(tokenizer).parse(text, opening=plan.opening, tools=tools)
        calls = tuple(ToolCall(f"call_{uuid.uuid4().hex[:24]}", name, arguments) for name, arguments in parsed.calls)
        if len(calls) > 1 and not asked.parallel:
            plan.findings.append("not_used:parallel_tool_calls")
        finish: Finish = "tool_calls" if calls else ("stop" if made.finish_reason == "stop" else "length")
        answer = Answer(
            record=plan.record,
            model=asked.model,
            created=int(plan.started),
            text=parsed.text,
            reasoning=parsed.reasoning,
            calls=calls,
            finish=finish,
            prompt_tokens=len(plan.ids or ()),
            output_ids=tuple(made.output_ids),
            logprobs=tuple(made.logprobs),
            version=made.spans[-1].version,
            stop=made.stopped_by or None,
            pieces=tuple(tokenizer.decode([i]) for i in made.output_ids) if asked.logprobs else (),
        )
        return answer, self._recorded(plan, made, answer, text)

    def _recorded(self, plan: _Plan, made: Generation, answer: Answer, text: str) -> Entry | None:
        session, place = plan.session, plan.place
        if session is None or place is None:
            return None
        if session.closed:
            raise gone(session.id)
        asked, prompt = plan.asked, tuple(plan.ids or ())
        said = Turn("assistant", text=answer.text, reasoning=answer.reasoning, calls=answer.calls, record=plan.record)
        session.tree.add(place, Linked(plan.record, place.turns, prompt + answer.output_ids, said))
        session.findings.update(plan.findings)
        seconds = time.time() - plan.started
        record = CallRecord(
            id=plan.record,
            parent=place.parent.id if place.parent is not None else "",
            fork=place.why,
            dialect=plan.dialect,
            model=asked.model,
            prompt_ids=prompt,
            output_ids=answer.output_ids,
            logprobs=answer.logprobs,
            weight_versions=made.spans,
            finish_reason=answer.finish,
            text=text,
            reasoning=answer.reasoning,
            content=answer.text,
            tool_calls=tuple(RecordedToolCall(id=c.id, name=c.name, arguments=c.arguments) for c in answer.calls),
            sampling=plan.sampling,
            asked=plan.refused,
            findings=tuple(plan.findings),
            started_at=plan.started,
            seconds=seconds,
        )
        system = asked.turns[0].text if asked.turns[0].role == "system" else ""
        kind = (asked.model, tuple(tool.name for tool in asked.tools), system)
        entry = Entry(record, kind, repeats=plan.repeats)
        self.sessions.record(session, entry, place.cut.id if place.cut is not None else "")
        return entry

    def _shows_tools(self, tokenizer: Any, tools: Sequence[Tool]) -> bool:
        """Whether the model's template writes tools at all: told by the first list of them that comes."""
        if self._tools_shown is None or self._tools_shown[0] is not tokenizer:
            self._tools_shown = (tokenizer, takes_tools(tokenizer, tools))
        return self._tools_shown[1]

    def _parser_of(self, tokenizer: Any) -> Parser:
        if self._parser is None or self._parser[0] is not tokenizer:
            self._parser = (tokenizer, Parser(tokenizer))
        return self._parser[1]

    # Streams

    async def _stream(
        self, module: DialectModule, request: Request, plan: _Plan, future: Future[Generation]
    ) -> Response:
        """The whole answer as events. What is ready or fails before the first ping has its own status."""
        pause = min(self._ping_seconds, self._seconds)
        quick = asyncio.ensure_future(self._made(request, plan, future))
        quick.add_done_callback(lambda made: made.cancelled() or made.exception())  # nobody may be left to ask for it
        try:
            await asyncio.wait({quick}, timeout=pause)
            if quick.done():
                answer, entry = quick.result()
        except BaseException:
            quick.cancel()
            raise
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        if quick.done():
            events = self._told(module, request, plan, answer, entry)
        else:
            events = self._held(module, request, plan, quick)
        return StreamingResponse(events, media_type="text/event-stream", headers=headers)

    async def _made(self, request: Request, plan: _Plan, future: Future[Generation]) -> tuple[Answer, Entry | None]:
        with self._counted(plan, future):
            made = await only(request, future, self._seconds)
        return self._answered(plan, made)

    async def _held(
        self,
        module: DialectModule,
        request: Request,
        plan: _Plan,
        made: asyncio.Future[tuple[Answer, Entry | None]],
    ) -> AsyncIterator[bytes]:
        """Open the stream and keep it alive until the answer is there."""
        try:
            yield module.opening(plan.asked, plan.record)
            while not made.done():
                await asyncio.wait({made}, timeout=self._ping_seconds)
                if not made.done():
                    yield module.PING
            try:
                answer, entry = made.result()
            except DeltawireError as error:
                status, code, message = error_of(error)
                yield module.error_event(status, code, message, plan.record)
                return
            except ClientGoneError:
                return
        finally:
            made.cancel()
        for event in module.events(plan.asked, answer):
            yield event
        await delivered(request, entry)

    async def _told(
        self, module: DialectModule, request: Request, plan: _Plan, answer: Answer, entry: Entry | None
    ) -> AsyncIterator[bytes]:
        yield module.opening(plan.asked, plan.record)
        for event in module.events(plan.asked, answer):
            yield event
        await delivered(request, entry)
