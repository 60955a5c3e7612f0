"""Calls without a session: batches split and merged, tried elsewhere until a replica answers; questions to all."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple, TypeVar

from pydantic import ValidationError

from sync.asgi import Send
from sync.errors import InvalidRequest, PeerUnavailable
from sync.schema.calls import (
    CallResult,
    ErrorBody,
    GenerateCall,
    GenerateRequest,
    GenerateResponse,
    ScoreRequest,
    ScoreResponse,
)

from .affinity import Affinity, Wish
from .passing import Asked, Passing, Reply, TurnedAwayError, error_of, json_reply, leave, there
from .replicas import Pool, Replica
from .upstream import Headers, UpstreamError, UpstreamLateError

_JSON: Headers = [(b"content-type", b"application/json")]
_ELSEWHERE = frozenset({"not_ready", "engine_failed"})
"""Codes with which a replica says of one call that it did not and will not answer it."""
T = TypeVar("T")


class Refusal(NamedTuple):
    """Why no replica answered a call."""

    status: int
    code: str
    message: str


class Calls(Passing):
    """Passes on calls that any replica can answer, each to the one that its prompt's beginning is known to."""

    def __init__(self, pool: Pool, affinity: Affinity, *, seconds: float, max_answer: int) -> None:
        super().__init__(pool, seconds=seconds, max_answer=max_answer)
        self._affinity = affinity

    async def generate(self, asked: Asked, send: Send) -> None:
        """A batch of native calls: each to its own replica, the answers in the order of the calls."""
        try:
            calls = GenerateRequest.model_validate_json(asked.body).calls
        except ValidationError:
            await self.stateless(asked, send)  # a replica says what is wrong with it
            return
        async with self.deadline():
            results = await self._spread(calls, frozenset())
        refusals = [r for r in results if isinstance(r, Refusal)]
        if len(refusals) == len(results):
            first = refusals[0]
            if first.status == 503:
                raise PeerUnavailable(first.message)
            raise InvalidRequest(first.message, status=first.status, code=first.code)
        found = tuple(
            CallResult(id=call.id, error=ErrorBody(code=r.code, message=r.message)) if isinstance(r, Refusal) else r
            for call, r in zip(calls, results, strict=True)
        )
        await json_reply(200, GenerateResponse(calls=found).model_dump_json().encode()).send(send)

    async def score(self, asked: Asked, send: Send) -> None:
        """Scores, all under one version: the whole request to one replica."""
        try:
            wanted = ScoreRequest.model_validate_json(asked.body)
        except ValidationError:
            await self.stateless(asked, send)
            return
        sizes = [max(0, len(s.ids) - s.start) for s in wanted.sequences]

        async def attempt(replica: Replica) -> Reply:
            reply = await self.whole(replica, asked)
            if reply.status == 200 and _score_sizes(reply.body) != sizes:
                raise UpstreamError(f"{replica.url} answered no ScoreResponse to these {len(sizes)} sequences")
            return reply

        async with self.deadline():
            reply = await self._anywhere(self._affinity.of_ids(wanted.sequences[0].ids), attempt)
        await reply.send(send)

    async def stateless(self, asked: Asked, send: Send) -> None:
        """A call in any dialect, streamed or not, passed through; tried elsewhere until an answer begins."""
        async with self.deadline() as limit:

            async def attempt(replica: Replica) -> None:
                async with replica.client.send(*asked[:4], key=asked.key) as answer:
                    await self.unless_turned_away(replica, answer)
                    limit.reschedule(None)
                    await self.relay(replica, answer, send)

            await self._anywhere(self._affinity.of_body(asked.body), attempt)

    async def any_status(self, asked: Asked, send: Send) -> None:
        """A question that any replica can answer, a usable one if there is one."""
        order = sorted((r for r in self.pool.replicas.values() if not r.away), key=lambda r: bool(r.obstacle))
        async with self.deadline():
            for replica in order:
                try:
                    reply = await self.whole(replica, asked)
                except TurnedAwayError as error:
                    reply = error.reply
                except PeerUnavailable:
                    continue
                await reply.send(send)
                return
        raise PeerUnavailable("no replica answers; see /router/status")

    async def poke(self, asked: Asked, send: Send) -> None:
        """The hint to every replica; it is for them to take it."""

        async def one(replica: Replica) -> str:
            try:
                return "poked" if (await self.whole(replica, asked)).status == 200 else "refused"
            except PeerUnavailable:
                return "away"

        async with self.deadline():
            said = await asyncio.gather(*map(one, self.pool.replicas.values()))
        if "poked" not in said:
            raise PeerUnavailable("no replica could be poked; see /router/status")
        body = {"status": "poked", "replicas": dict(zip(self.pool.replicas, said, strict=True))}
        await json_reply(200, json.dumps(body).encode()).send(send)

    async def _spread(self, calls: Sequence[GenerateCall], tried: frozenset[str]) -> list[CallResult | Refusal]:
        wishes = [self._affinity.of_call(call) for call in calls]
        try:
            await self.pool.find(wishes[0], tried)
        except PeerUnavailable as error:
            return [Refusal(503, "not_ready", str(error))] * len(calls)
        parts: dict[str, list[int]] = {}
        for i, wish in enumerate(wishes):  # no await in here: what was found is still there
            replica = self.pool.choose(wish, tried)
            assert replica is not None
            replica.in_flight += 1
            parts.setdefault(replica.url, []).append(i)
        found: dict[int, CallResult | Refusal] = {}
        tasks = []
        for url, places in parts.items():
            replica = self.pool.replicas[url]
            task = asyncio.ensure_future(self._part(replica, [calls[i] for i in places], tried | {url}))
            task.add_done_callback(functools.partial(_left, replica, len(places)))
            tasks.append(task)
        try:
            for places, results in zip(parts.values(), await asyncio.gather(*tasks), strict=True):
                found.update(zip(places, results, strict=True))
        finally:
            for task in tasks:
                task.cancel()
        return [found[i] for i in range(len(calls))]

    async def _part(
        self, replica: Replica, calls: Sequence[GenerateCall], tried: frozenset[str]
    ) -> list[CallResult | Refusal]:
        """The calls of a batch that are for one replica; what it leaves unanswered goes on to those not tried."""
        try:
            results = await self._post(replica, calls)
        except UpstreamLateError as error:
            return [Refusal(504, "deadline", str(error))] * len(calls)
        except InvalidRequest as error:
            return [Refusal(error.status, error.code, str(error))] * len(calls)
        except PeerUnavailable as error:
            self.blame(replica, error)
            ours = _refusal_of(error)
            return [ours if isinstance(r, Refusal) else r for r in await self._spread(calls, tried)]
        replica.answered += len(calls)
        for result in results:
            self._affinity.learn(result, replica.url)
        again = [i for i, r in enumerate(results) if r.error is not None and r.error.code in _ELSEWHERE]
        found: list[CallResult | Refusal] = list(results)
        if again:
            for i, other in zip(again, await self._spread([calls[i] for i in again], tried), strict=True):
                found[i] = found[i] if isinstance(other, Refusal) else other
        return found

    async def _post(self, replica: Replica, calls: Sequence[GenerateCall]) -> tuple[CallResult, ...]:
        body = GenerateRequest(calls=tuple(calls)).model_dump_json().encode()
        reply = await self.whole(replica, Asked("POST", "/v1/generate", _JSON, body))
        if reply.status != 200:
            error = error_of(reply)
            raise InvalidRequest(error.message, status=reply.status, code=error.code)
        try:
            results = GenerateResponse.model_validate_json(reply.body).calls
        except ValidationError:
            raise UpstreamError(f"{replica.url} answered no GenerateResponse") from None
        if [r.id for r in results] != [c.id for c in calls]:
            raise UpstreamError(f"{replica.url} answered other calls than the {len(calls)} that were sent")
        return results

    async def _anywhere(self, wish: Wish, attempt: Callable[[Replica], Awaitable[T]]) -> T:
        """Try replicas in the wish's order until one answers. Nothing was delivered by an attempt that fails, so that
        sampling again is safe."""
        tried: frozenset[str] = frozenset()
        last: PeerUnavailable | None = None
        while True:
            try:
                replica = await self.pool.find(wish, tried)
            except PeerUnavailable as error:
                raise last or error from None
            with there(replica):
                try:
                    return await attempt(replica)
                except UpstreamLateError as error:
                    raise InvalidRequest(str(error), status=504, code="deadline") from None
                except PeerUnavailable as error:
                    self.blame(replica, error)
                    last = error
            tried |= {replica.url}


def _left(replica: Replica, calls: int, _: object) -> None:
    leave(replica, calls)


def _refusal_of(error: PeerUnavailable) -> Refusal:
    if isinstance(error, TurnedAwayError):
        return Refusal(error.reply.status, error_of(error.reply).code, str(error))
    return Refusal(503, "not_ready", str(error))


def _score_sizes(body: bytes) -> list[int]:
    try:
        return [len(values) for values in ScoreResponse.model_validate_json(body).logprobs]
    except ValidationError:
        return [-1]
