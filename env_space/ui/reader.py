"""The routes that the inspector reads, as typed calls: it knows nothing that another client would not."""

from __future__ import annotations

import re
import ssl
from typing import TypeVar
from urllib.parse import quote

import httpx
from pydantic import BaseModel, ValidationError

from sync.errors import InvalidRequest, PeerUnavailable, RejectError
from sync.schema.calls import ErrorResponse
from sync.schema.rollouts import Rollout, RolloutPage, ServiceStatus

from .bodies import Artifact, Channels, Environments, GroupIds, Series, Summary, Tasks

M = TypeVar("M", bound=BaseModel)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class Reader:
    """Reads the rollout service at `base_url` with our token; every call ends within `timeout` seconds.

    Raises PeerUnavailable when the service does not answer in time or answers 5xx, InvalidRequest for a 4xx
    (with its status and code) and RejectError for an answer of another shape.
    """

    def __init__(self, base_url: str, token: str, timeout: float = 10.0) -> None:
        self._url = base_url.rstrip("/")
        self._headers = {"authorization": f"Bearer {token}"}
        self._timeout = timeout
        self._tls = ssl.create_default_context()  # reading the CA bundle takes longer than a whole request

    async def status(self) -> ServiceStatus:
        """What the service does now."""
        return await self._get("/v1/status", {}, ServiceStatus)

    async def recent(self, run: str, status: str, offset: int, limit: int) -> RolloutPage:
        """A page of rollouts, newest first; an empty `run` or `status` means any."""
        query: dict[str, str | int] = {"offset": offset, "limit": limit}
        query |= {name: value for name, value in (("run", run), ("status", status)) if value}
        return await self._get("/v1/rollouts/recent", query, RolloutPage)

    async def rollout(self, name: str) -> Rollout:
        """One whole rollout; InvalidRequest with status 404 when the service holds none of that id."""
        if not _NAME.fullmatch(name):
            raise InvalidRequest(f"{name!r} cannot be a rollout id", status=404, code="not_found")
        return await self._get(f"/v1/rollouts/{quote(name, safe='')}", {}, Rollout)

    async def group(self, name: str) -> tuple[str, ...]:
        """The ids of a group's rollouts, in order."""
        return (await self._get("/v1/group", {"name": name}, GroupIds)).rollouts

    async def environments(self) -> Environments:
        """What the Space can roll."""
        return await self._get("/v1/environments", {}, Environments)

    async def tasks(self, environment: str) -> tuple[str, ...]:
        """The task keys of one environment."""
        return (await self._get("/v1/tasks", {"environment": environment}, Tasks)).tasks

    async def summary(self) -> Summary:
        """Counts and means per task over the stored rollouts."""
        return await self._get("/v1/summary", {}, Summary)

    async def series(self, run: str) -> Series:
        """Windows over the stored rollouts of a run, or of every run."""
        return await self._get("/v1/series", {"run": run} if run else {}, Series)

    async def channels(self, run: str) -> Channels:
        """The newest versions of every channel of a run's bucket."""
        return await self._get("/v1/channels", {"run": run}, Channels)

    async def artifact(self, run: str, channel: str, version: str) -> Artifact:
        """One version of the run's curriculum, guidance or rubric."""
        return await self._get("/v1/artifacts", {"run": run, "channel": channel, "version": version}, Artifact)

    async def _get(self, path: str, query: dict[str, str | int], model: type[M]) -> M:
        try:
            async with httpx.AsyncClient(
                headers=self._headers, timeout=self._timeout, verify=self._tls, trust_env=False
            ) as client:
                answer = await client.get(self._url + path, params=query)
        except httpx.HTTPError as error:
            raise PeerUnavailable(
                f"the rollout service at {self._url} did not answer GET {path} within {self._timeout:g} s "
                f"({type(error).__name__}); see whether its process runs and read its log"
            ) from None
        if answer.status_code != httpx.codes.OK:
            raise _refusal(path, answer)
        try:
            return model.model_validate_json(answer.content)
        except ValidationError as error:
            raise RejectError(
                f"GET {path} answered something else than a {model.__name__} "
                f"({error.error_count()} fields differ); the inspector and the service must be of the same release"
            ) from None


def _refusal(path: str, answer: httpx.Response) -> InvalidRequest | PeerUnavailable:
    try:
        body = ErrorResponse.model_validate_json(answer.content).error
        code, message = body.code, body.message
    except ValidationError:
        code, message = "unknown", answer.text[:200] or answer.reason_phrase
    text = f"GET {path} answered {answer.status_code}: {message}"
    if answer.is_client_error:
        return InvalidRequest(text, status=answer.status_code, code=code)
    return PeerUnavailable(text)
