"""The policy as episodes see it: one call in, one result out. Calls of concurrent episodes share requests.

A policy that does not answer, answers nonsense or any status but 200, 400, 413 and 422 is *away*: the request is sent
again with growing pauses until it succeeds, and the episodes' deadlines stand still meanwhile (`away`).
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any

import httpx
from pydantic import ValidationError
from pydantic_core import to_json

from sync.errors import InvalidRequest, PeerUnavailable
from sync.schema.calls import REFUSED_CODES, TOO_LONG_CODES, CallResult, ErrorResponse, GenerateResponse

from ..config import PolicyLimits

Call = dict[str, Any]
_Pending = tuple[Call, "asyncio.Future[CallResult]"]
_FIRST_PAUSE = 0.05


@dataclass(slots=True)
class Totals:
    """What all policies of this process did: answered calls, their output ids, seconds that episodes waited."""

    calls: int = 0
    output_tokens: int = 0
    wait_seconds: float = 0.0


class _Refused(Exception):
    """The policy refuses this body (400, 413, 422); sending it again would not help."""

    def __init__(self, message: str, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.code = code


class Policy:
    """Client of `POST {url}/v1/generate`. Bounded by its callers: an episode has one call in flight."""

    def __init__(self, url: str, token: str, limits: PolicyLimits, totals: Totals) -> None:
        self.url = url.rstrip("/")
        self.totals = totals
        self.failures = 0
        self.last_error = ""
        self._limits = limits
        self._pending: list[_Pending] = []
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._requests = asyncio.Semaphore(limits.max_requests)
        self._away_since: float | None = None
        self._away_total = 0.0
        self._http = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {token}", "Content-Type": "application/json"},
            timeout=httpx.Timeout(limits.call_seconds, connect=min(10.0, limits.call_seconds)),
            limits=httpx.Limits(max_connections=limits.max_requests),
        )

    def away(self) -> float:
        """Seconds so far in which the policy was away, the current absence included."""
        now = 0.0 if self._away_since is None else time.monotonic() - self._away_since
        return self._away_total + now

    def generate(self, call: Call) -> asyncio.Future[CallResult]:
        """Submit one GenerateCall as a plain dict.

        The future gives a result without `error`, or raises PeerUnavailable (infrastructure: the call may be made
        again) or InvalidRequest (the policy refuses this call, for instance an over-long prompt).
        """
        future: asyncio.Future[CallResult] = asyncio.get_running_loop().create_future()
        self._pending.append((call, future))
        if len(self._pending) >= self._limits.max_batch:
            self._flush()
        elif self._timer is None:
            self._timer = future.get_loop().call_later(self._limits.window_ms / 1000, self._flush)
        return future

    async def close(self) -> None:
        """Give up all calls and close the connections."""
        if self._timer is not None:
            self._timer.cancel()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for _, future in self._pending:
            future.cancel()
        await self._http.aclose()

    def _flush(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        batch, self._pending = self._pending, []
        task = asyncio.get_running_loop().create_task(self._deliver(batch))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _deliver(self, batch: list[_Pending]) -> None:
        try:
            async with self._requests:
                await self._until_answered(batch)
        finally:
            for _, future in batch:
                future.cancel()

    async def _until_answered(self, batch: list[_Pending]) -> None:
        began, pause = time.monotonic(), _FIRST_PAUSE
        while batch := [item for item in batch if not item[1].done()]:
            attempt = time.monotonic()
            try:
                results = await self._post([call for call, _ in batch])
            except _Refused as error:
                if len(batch) > 1:
                    half = len(batch) // 2
                    await self._until_answered(batch[:half])
                    batch = batch[half:]
                    continue
                _fail(batch, InvalidRequest(str(error), code=error.code))
            except PeerUnavailable as error:
                self._note_away(attempt, error)
                if time.monotonic() - began > self._limits.away_seconds:
                    _fail(batch, error)
                    return
                await asyncio.sleep(pause)
                pause = min(2 * pause, self._limits.backoff_seconds)
            else:
                self._note_answer(attempt)
                self._settle(batch, results)

    async def _post(self, calls: list[Call]) -> tuple[CallResult, ...]:
        where = f"{self.url}/v1/generate"
        try:
            async with asyncio.timeout(self._limits.call_seconds):
                answer = await self._http.post(where, content=to_json({"calls": calls}))
        except TimeoutError:
            seconds = self._limits.call_seconds
            raise PeerUnavailable(f"{where} gave no answer within {seconds} s (setting policy.call_seconds)") from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise PeerUnavailable(f"{where} does not answer: {type(error).__name__} {error}") from None
        if answer.status_code in (400, 413, 422):
            raise _refusal(where, answer)
        if answer.status_code != 200:
            raise PeerUnavailable(f"{where} answered {answer.status_code}: {answer.text[:300]}")
        try:
            results = GenerateResponse.model_validate_json(answer.content).calls
        except ValidationError as error:
            raise PeerUnavailable(f"{where} answered no GenerateResponse: {str(error)[:300]}") from None
        if [r.id for r in results] != [c["id"] for c in calls]:
            raise PeerUnavailable(f"{where} answered other calls than the {len(calls)} that were sent")
        if all(r.error is not None and not _final(r) for r in results):
            raise PeerUnavailable(f"{where} failed every call: {_said(results[0])}")
        return results

    def _settle(self, batch: list[_Pending], results: tuple[CallResult, ...]) -> None:
        for (_, future), result in zip(batch, results, strict=True):
            if future.done():
                continue
            if result.error is None:
                self.totals.calls += 1
                self.totals.output_tokens += len(result.output_ids)
                future.set_result(result)
            elif _final(result):
                future.set_exception(InvalidRequest(_said(result), code=result.error.code))
            else:
                self.failures += 1
                self.last_error = f"{self.url}/v1/generate failed call {result.id}: {_said(result)}"
                future.set_exception(PeerUnavailable(self.last_error))

    def _note_away(self, since: float, error: PeerUnavailable) -> None:
        self.failures += 1
        self.last_error = str(error)
        if self._away_since is None:
            self._away_since = since

    def _note_answer(self, attempt: float) -> None:
        if self._away_since is not None and attempt >= self._away_since:
            self._away_total += time.monotonic() - self._away_since
            self._away_since = None
            self.last_error = ""


def _final(result: CallResult) -> bool:
    """True where the same call would be refused again."""
    return result.error is not None and result.error.code in TOO_LONG_CODES | REFUSED_CODES


def _refusal(where: str, answer: httpx.Response) -> _Refused:
    try:
        error = ErrorResponse.model_validate_json(answer.content).error
    except ValidationError:
        return _Refused(f"{where} answered {answer.status_code}: {answer.text[:300]}")
    return _Refused(f"{where} answered {answer.status_code}: {error.message[:300]}", error.code)


def _said(result: CallResult) -> str:
    return "" if result.error is None else f"{result.error.code}: {result.error.message}"


def _fail(batch: list[_Pending], error: Exception) -> None:
    for _, future in batch:
        if not future.done():
            future.set_exception(error)
