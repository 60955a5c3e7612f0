"""Requests of a session: to the one replica that holds it, and lists over all."""

from __future__ import annotations

import asyncio
import json
import secrets

from pydantic import ValidationError

from sync.asgi import Send
from sync.errors import InvalidRequest, PeerUnavailable
from sync.schema.sessions import SessionLine, SessionPage

from .passing import Asked, Passing, Reply, TurnedAwayError, json_reply, there
from .replicas import Replica
from .upstream import UpstreamError, UpstreamLateError

_DRAWS = 64
_PAUSES = (0.1, 0.2, 0.4, None)
"""Before a session's request is sent again where its replica refused the connection."""


class Sessions(Passing):
    """Passes on what belongs to a session."""

    async def at_home(self, asked: Asked, session: str, send: Send) -> None:
        """A session's request, to the replica that holds it and no other.

        Raises PeerUnavailable when that replica is away, InvalidRequest (502) when the request was lost on its way.
        """
        async with self.deadline() as limit:
            replica = self.pool.home(session)
            if replica.away:
                raise PeerUnavailable(f"{replica.url}, which holds this session, is away: {replica.trouble}; ask again")
            if asked.method == "POST":
                await self.pool.settled(replica)
            with there(replica):
                await self._deliver(replica, asked, send, limit)

    async def _deliver(self, replica: Replica, asked: Asked, send: Send, limit: asyncio.Timeout) -> None:
        """Send it, again only where the connection was refused: what may have arrived is not sent twice."""
        for pause in _PAUSES:
            try:
                async with replica.client.send(*asked[:4], key=asked.key) as answer:
                    limit.reschedule(None)
                    return await self.relay(replica, answer, send)
            except UpstreamLateError as error:
                raise InvalidRequest(str(error), status=504, code="deadline") from None
            except UpstreamError as error:
                if not error.refused:
                    self.blame(replica, error)
                    text = f"{error}; the request may have arrived there, so it was not sent again"
                    raise InvalidRequest(text, status=502, code="internal") from None
                if pause is None:
                    self.blame(replica, error)
                    raise
            await asyncio.sleep(pause)
        return None

    async def open(self, asked: Asked, send: Send) -> None:
        """A new session: at the home of its id, which is drawn here unless the body names one."""
        try:
            body = json.loads(asked.body or b"{}")
        except (ValueError, RecursionError):
            body = None
        if not isinstance(body, dict):
            raise InvalidRequest("body: must be a JSON object")
        name = body.get("id")
        if name is None:
            name = body["id"] = self._draw()
        if not isinstance(name, str):
            raise InvalidRequest("id: must be text")
        await self.at_home(asked._replace(body=json.dumps(body).encode()), name, send)

    def _draw(self) -> str:
        """A random id whose home takes calls now, if any replica does."""
        drawn = ""
        for _ in range(_DRAWS):
            drawn = secrets.token_hex(16)
            if not self.pool.home(drawn).obstacle:
                break
        return drawn

    async def list_sessions(self, asked: Asked, send: Send) -> None:
        """The sessions of all replicas, the newest first; who did not answer is named in `x-deltawire-away`."""

        async def one(replica: Replica) -> Reply | None:
            try:
                return await self.whole(replica, asked)
            except TurnedAwayError as error:
                return error.reply
            except PeerUnavailable:
                return None

        present = [r for r in self.pool.replicas.values() if not r.away]
        async with self.deadline():
            replies = dict(zip(present, await asyncio.gather(*map(one, present)), strict=True))
        lines: list[SessionLine] = []
        missing = [r.url for r in self.pool.replicas.values() if replies.get(r) is None]
        for reply in filter(None, replies.values()):
            if reply.status != 200:
                await reply.send(send)
                return
            try:
                lines += SessionPage.model_validate_json(reply.body).sessions
            except ValidationError:
                missing += [r.url for r, said in replies.items() if said is reply]
        if len(missing) == len(self.pool.replicas):
            raise PeerUnavailable("no replica listed its sessions; see /router/status")
        lines.sort(key=lambda line: line.created_at, reverse=True)
        headers = [(b"x-deltawire-away", " ".join(missing).encode())] if missing else []
        page = SessionPage(sessions=tuple(lines)).model_dump_json().encode()
        await json_reply(200, page, headers).send(send)
