"""HTTP to the Spaces: one client per Space, typed errors, every wait with a deadline that names the peer."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

import httpx

from sync.errors import InvalidRequest, PeerUnavailable
from sync.schema.base import Wire

T = TypeVar("T", bound=Wire)


class Peer:
    """A Space at `url`. Thread-safe. Close it."""

    def __init__(self, url: str, token: str, *, seconds: float = 30.0) -> None:
        self.url = url.rstrip("/")
        headers = {"Authorization": f"Bearer {token}"}
        self._client = httpx.Client(base_url=self.url, headers=headers, timeout=seconds)

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def get(self, path: str, answer: type[T], *, seconds: float | None = None, **query: Any) -> T:
        """GET `path`; raises PeerUnavailable (no answer, 5xx, 429) or InvalidRequest (4xx)."""
        return self._send(answer, "GET", path, seconds, params=query)

    def post(self, path: str, body: Wire, answer: type[T]) -> T:
        """POST a wire model; same errors as `get`."""
        return self._send(answer, "POST", path, None, content=body.model_dump_json())

    def call(self, method: str, path: str, *, seconds: float | None = None, **query: Any) -> Any:
        """Any request, parsed as plain JSON (None for an empty body); same errors as `get`."""
        content = self._raw(method, path, seconds, params=query).content
        return httpx.Response(200, content=content).json() if content else None

    def _send(self, answer: type[T], method: str, path: str, seconds: float | None, **parts: Any) -> T:
        response = self._raw(method, path, seconds, **parts)
        try:
            return answer.model_validate_json(response.content)
        except ValueError as error:
            raise PeerUnavailable(
                f"{self.url}{path} answered something that is no {answer.__name__}: {error}"
            ) from None

    def _raw(self, method: str, path: str, seconds: float | None, **parts: Any) -> httpx.Response:
        if "content" in parts:
            parts["headers"] = {"content-type": "application/json"}
        try:
            timeout = httpx.USE_CLIENT_DEFAULT if seconds is None else seconds
            response = self._client.request(method, path, timeout=timeout, **parts)
        except httpx.TransportError as error:
            raise PeerUnavailable(f"{self.url}{path} did not answer ({type(error).__name__}: {error})") from None
        if response.is_success:
            return response
        said = _message(response)
        if response.status_code == httpx.codes.UNAUTHORIZED:
            said = "DELTAWIRE_TOKEN here is not the one that this Space was started with"
        if response.status_code >= 500 or response.status_code == 429:
            raise PeerUnavailable(f"{self.url}{path} answered {response.status_code}: {said}")
        raise InvalidRequest(f"{self.url}{path} refused: {said}", status=response.status_code)

    def wait_for(self, what: str, check: Callable[[], str | None], seconds: float) -> None:
        """Call `check` until it returns None; at the deadline raise PeerUnavailable with its last answer."""
        give_up = time.monotonic() + seconds
        while True:
            try:
                missing = check()
            except PeerUnavailable as error:
                missing = str(error)
            if missing is None:
                return
            if time.monotonic() > give_up:
                raise PeerUnavailable(f"{self.url}: {what} did not happen within {seconds:.0f} s; last: {missing}")
            time.sleep(0.1)


def _message(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return response.text[:200] or "(empty body)"
