"""Episodes played by hand, through the Space's own OpenEnv sockets; one per page, and a bounded number of them."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any
from urllib.parse import quote

from pydantic import ValidationError
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import WebSocketException

from sync.errors import InvalidRequest, PeerUnavailable, RejectError
from sync.schema.calls import Message

GAMES = 16
"""Episodes that are open at once; the one that was left alone for longest makes room for another."""
SECONDS = 60.0
"""Deadline of one answer of the environment."""
FRAME = 16 << 20


class Game:
    """One episode: what was said so far, and how it ended. `rewards` is None while it runs or where it is unknown."""

    def __init__(self, socket: ClientConnection, environment: str) -> None:
        self._socket = socket
        self.environment = environment
        self.facts: dict[str, Any] = {}
        self.talk: list[Message] = []
        self.rewards: dict[str, float] | None = None
        self.success: bool | None = None
        self.done = False
        self.used = time.monotonic()
        self._turn = asyncio.Lock()

    async def ask(self, kind: str, data: dict[str, Any]) -> None:
        """Send one frame and take in its answer. Raises PeerUnavailable when the socket is lost or nothing comes in
        time, InvalidRequest for what the environment refuses."""
        async with self._turn:
            self.used = time.monotonic()
            try:
                async with asyncio.timeout(SECONDS):
                    await self._socket.send(json.dumps({"type": kind, "data": data}))
                    frame = json.loads(await self._socket.recv())
            except (OSError, TimeoutError, WebSocketException) as error:
                raise PeerUnavailable(
                    f"the episode's socket is lost ({type(error).__name__}: {error}); start another episode"
                ) from None
            if kind == "step" and frame.get("type") != "error":
                self.talk.append(Message(role="assistant", content=data["message"]))
            self._heard(frame)

    def _heard(self, frame: dict[str, Any]) -> None:
        answer = frame.get("data") or {}
        if frame.get("type") != "observation":
            raise InvalidRequest(str(answer.get("message", "the environment answered no observation")))
        observation = answer["observation"]
        facts = observation.get("metadata") or answer.get("metadata") or {}
        try:
            self.talk += [Message.model_validate(m) for m in observation["messages"]]
        except ValidationError:
            raise RejectError("the environment's messages are not of this release's shape") from None
        self.facts |= {k: facts[k] for k in ("task", "seed") if k in facts}
        self.done = answer.get("done") is True
        self.rewards, self.success = facts.get("rewards"), facts.get("success")

    async def close(self) -> None:
        """End the episode and its socket."""
        await self._socket.close()


class Games:
    """The open episodes of the pages, by page, at the Space that answers under `base_url`."""

    def __init__(self, base_url: str, token: str, most: int = GAMES) -> None:
        self._url = "ws" + base_url.rstrip("/").removeprefix("http")
        self._headers = {"authorization": f"Bearer {token}"}
        self._most = most
        self._games: dict[str, Game] = {}

    def __len__(self) -> int:
        """How many are open."""
        return len(self._games)

    async def start(self, page: str, environment: str, task: str, seed: int | None) -> Game:
        """End the page's episode and begin another. Raises as `Game.ask`."""
        await self.leave(page)
        while len(self._games) >= self._most:
            await self.leave(min(self._games, key=lambda name: self._games[name].used))
        url = f"{self._url}/openenv/{quote(environment, safe='')}/ws"
        try:
            socket = await connect(
                url, additional_headers=self._headers, proxy=None, open_timeout=SECONDS, max_size=FRAME
            )
        except (OSError, TimeoutError, WebSocketException) as error:
            raise PeerUnavailable(f"{url} gives no episode ({error}); is it an environment of this Space?") from None
        game = self._games[page] = Game(socket, environment)
        try:
            await game.ask("reset", {k: v for k, v in (("task", task or None), ("seed", seed)) if v is not None})
        except BaseException:
            await self.leave(page)
            raise
        return game

    def game(self, page: str) -> Game:
        """The page's episode; raises InvalidRequest where it has none."""
        if page not in self._games:
            raise InvalidRequest("no episode is open here (it ended, or made room for another): start one")
        return self._games[page]

    async def leave(self, page: str) -> None:
        """End the page's episode, if it has one."""
        game = self._games.pop(page, None)
        if game is not None:
            await game.close()
