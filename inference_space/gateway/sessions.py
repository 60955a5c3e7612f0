"""Capture sessions in memory: limits, calls, and the chains made of them. Use from one thread, the event loop."""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from sync.chains import ChainBuilder
from sync.errors import InvalidRequest
from sync.schema.calls import CallResult
from sync.schema.sessions import (
    CallRecord,
    CallRole,
    Session,
    SessionChain,
    SessionKey,
    SessionLine,
    SessionPage,
    SessionRequest,
)
from sync.session_keys import make_key

from .linking import Tree


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """most: sessions at once; idle_seconds: how long one lives without a call; calls, tokens: most per session, the
    tokens counted over prompts and outputs of all calls (that is what is held in memory)."""

    most: int = 4_096
    idle_seconds: float = 3_600.0
    calls: int = 2_048
    tokens: int = 16_777_216


@dataclass(slots=True)
class Entry:
    """A call of a session: its record, what tells its role (`kind`: model, tools and system text of its request), and
    its fate: `repeats` (its client said that it asks again), `delivered` (all was sent), `cut` (its client has a part
    of it and goes on with another answer)."""

    record: CallRecord
    kind: tuple[str, tuple[str, ...], str]
    repeats: bool = False
    delivered: bool = False
    cut: bool = False


@dataclass(eq=False, slots=True)
class Open:
    """A session that is open. `active` holds what the engine still works on for it."""

    id: str
    request: SessionRequest
    created_at: float
    touched: float
    tree: Tree = field(default_factory=Tree)
    entries: list[Entry] = field(default_factory=list)
    active: set[Future[Any]] = field(default_factory=set)
    findings: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    closed: bool = False

    def copy(self) -> Open:
        """What `trace` needs, for another thread: it takes long for long sessions."""
        return replace(self, entries=list(self.entries), active=set(self.active), findings=Counter(self.findings))


class Sessions:
    """All open sessions of a Space. `now` is a clock that does not jump."""

    def __init__(self, token: str, limits: SessionLimits, now: Callable[[], float] = time.monotonic) -> None:
        self._token, self._limits, self._now = token, limits, now
        self._open: dict[str, Open] = {}
        self._calls = self._tokens = 0

    def counts(self) -> dict[str, int]:
        """Open sessions; calls recorded and tokens sampled in all sessions so far."""
        return {"sessions_open": len(self._open), "session_calls": self._calls, "session_tokens": self._tokens}

    def open(self, request: SessionRequest) -> SessionKey:
        """Open a session, or find the one that was opened so. Raises InvalidRequest: 409 for another body under its
        name, 429 when there are too many."""
        name = request.id or f"s-{secrets.token_hex(8)}"
        held = self._open.get(name)
        if held is None:
            self._reap()
            if len(self._open) >= self._limits.most:
                raise InvalidRequest(
                    f"{len(self._open)} sessions are open (setting max_sessions); delete those that are done",
                    status=429,
                    code="overloaded",
                )
            self._open[name] = Open(name, request, time.time(), self._now())
        elif held.request != request:
            text = f"session {name} is open with other settings; delete it first, or take another id"
            raise InvalidRequest(text, status=409, code="conflict")
        key = make_key(self._token, name)
        return SessionKey(id=name, key=key, path=f"/s/{key}", idle_seconds=self._limits.idle_seconds)

    def get(self, name: str) -> Open:
        """The session of that name. Raises InvalidRequest (404) when it is not open (any more)."""
        self._reap()
        held = self._open.get(name)
        if held is None:
            raise gone(name)
        held.touched = self._now()
        return held

    def admit(self, session: Open) -> None:
        """Raise InvalidRequest (429) when the session may make no further call."""
        for count, most, name in (
            (len(session.entries) + len(session.active), self._limits.calls, "max_session_calls"),
            (session.tokens, self._limits.tokens, "max_session_tokens"),
        ):
            if count >= most:
                text = f"session {session.id} has reached its limit of {most} (setting {name}); open another"
                raise InvalidRequest(text, status=429, code="session_full")

    def record(self, session: Open, entry: Entry, cut: str = "") -> None:
        """Keep an answered call; its request shows that of the answer of `cut` only a part arrived."""
        for other in session.entries:
            other.cut = other.cut or other.record.id == cut
        session.touched = self._now()
        self._calls += 1
        self._tokens += len(entry.record.output_ids)
        session.tokens += len(entry.record.prompt_ids) + len(entry.record.output_ids)
        session.entries.append(entry)

    def delete(self, name: str) -> None:
        """Forget a session and cancel what runs for it. Raises InvalidRequest (404) when it is not open."""
        session = self.get(name)
        del self._open[name]
        session.closed = True
        for future in list(session.active):
            future.cancel()

    def page(self) -> SessionPage:
        """All of them, the newest first."""
        self._reap()
        lines = [
            SessionLine(
                id=s.id,
                purpose=s.request.purpose,
                created_at=s.created_at,
                active=len(s.active),
                calls=len(s.entries),
                output_tokens=sum(len(e.record.output_ids) for e in s.entries),
            )
            for s in reversed(self._open.values())
        ]
        return SessionPage(sessions=tuple(lines))

    def _reap(self) -> None:
        before = self._now() - self._limits.idle_seconds
        for name in [n for n, s in self._open.items() if s.touched < before and not s.active]:
            self._open.pop(name).closed = True


def gone(name: str) -> InvalidRequest:
    """There is no such session (any more)."""
    text = f"session {name} is not open: it was deleted, idle for too long, or never opened here"
    return InvalidRequest(text, status=404, code="session_not_found")


def trace(session: Open) -> Session:
    """The session as it is told: roles and superseded calls decided, chains made of the rest."""
    calls = judged(session.entries)
    return Session(
        id=session.id,
        purpose=session.request.purpose,
        created_at=session.created_at,
        active=len(session.active),
        calls=calls,
        chains=chains_of(calls, session.request.train),
        findings=dict(session.findings),
    )


def judged(entries: Sequence[Entry]) -> tuple[CallRecord, ...]:
    """Records with `role`, `delivered` and `superseded` filled in.

    A call that goes on from another one has its role. Main is the kind of conversation (model, tools, system text) that
    first had tools (without any: the first); one without tools where the main one has them is a side call (titles,
    summaries), anything else a subagent. A call is superseded when the same
    prompt was asked again after it had ended, and either its answer did not arrive, or the client said that it
    repeats, or the agent went on with another answer and never with this one; or when the agent has a part of it only.
    """
    roles = _roles(entries)
    extended = {e.record.parent for e in entries}
    by_prompt: dict[tuple[int, ...], list[Entry]] = {}
    for entry in entries:
        by_prompt.setdefault(entry.record.prompt_ids, []).append(entry)
    gone: set[str] = set()
    for same in by_prompt.values():
        used = any(e.record.id in extended for e in same)
        for entry in same:
            later = [o for o in same if o.record.started_at >= entry.record.started_at + entry.record.seconds]
            later = [o for o in later if o is not entry]
            unread = not entry.delivered or used or any(o.repeats for o in later)
            if (entry.cut or (later and unread)) and entry.record.id not in extended:
                gone.add(entry.record.id)
    return tuple(
        e.record.model_copy(
            update={"role": roles[e.record.id], "delivered": e.delivered, "superseded": e.record.id in gone}
        )
        for e in entries
    )


def _roles(entries: Sequence[Entry]) -> dict[str, CallRole]:
    kinds = [entry.kind for entry in sorted(entries, key=lambda entry: entry.record.started_at)]
    main = next((kind for kind in kinds if kind[1]), kinds[0] if kinds else None)
    roles: dict[str, CallRole] = {}
    for entry in entries:  # an answer is recorded before any call that goes on from it
        kind, parent = entry.kind, roles.get(entry.record.parent)
        without = main is not None and main[1] and not kind[1]
        roles[entry.record.id] = parent or ("main" if kind == main else "side" if without else "subagent")
    return roles


def chains_of(calls: Sequence[CallRecord], train: Sequence[CallRole]) -> tuple[SessionChain, ...]:
    """Calls that count, merged by prefix. Outputs of other roles than those in `train` get mask 0."""
    builder = ChainBuilder()
    by_id = {call.id: call for call in calls if not call.superseded}
    for call in by_id.values():
        result = CallResult(
            id=call.id,
            prompt_ids=call.prompt_ids,
            output_ids=call.output_ids,
            logprobs=call.logprobs,
            weight_versions=call.weight_versions,
        )
        builder.append(result, trained=call.role in train)
    return tuple(
        SessionChain(
            chain=chain,
            calls=origin.calls,
            role=by_id[origin.calls[0]].role,
            fork=by_id[origin.calls[0]].fork,
            fork_at=origin.fork_at,
            truncated=by_id[origin.calls[-1]].finish_reason == "length",
        )
        for chain, origin in zip(builder.chains(), builder.origins(), strict=True)
    )
