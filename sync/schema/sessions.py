"""HTTP bodies of captured conversations: what an agent program said to the gateway, call by call and as chains."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from .base import Wire
from .calls import Ids, Sampling, Temperature, VersionSpan
from .rollouts import Chain, Name

CallRole = Literal["main", "subagent", "side"]
Dialect = Literal["chat", "responses", "messages"]


class SessionRequest(Wire):
    """Open a session. Opening it again with the same body finds it as it is; another body is refused (409).

    Without `id` the Space draws one. In a training session `temperature` is what every call is sampled with, whatever
    the agent asks; in an evaluation the agent's own counts, and this one where it names none. `max_tokens` bounds the
    output of each call. Calls of the roles in `train` are trainable (mask 1).
    """

    id: Name | None = None
    purpose: Literal["training", "evaluation"] = "training"
    temperature: Temperature = 1.0
    max_tokens: int | None = Field(default=None, ge=1, le=1_048_576)
    train: tuple[CallRole, ...] = ("main", "subagent")


class SessionKey(Wire):
    """What an agent needs: `key` as its API key, or as a part of its base URL (`path`: `/s/<key>`).

    A session that no call reaches for `idle_seconds` is dropped.
    """

    id: Name
    key: str
    path: str
    idle_seconds: float


class RecordedToolCall(Wire):
    """A call of a tool; `arguments` as sampled, JSON or not."""

    id: str
    name: str
    arguments: str


class CallRecord(Wire):
    """One answered call. `parent` is the call whose recorded ids its prompt extends, "" for none; `fork` says why there
    is none although the session had calls before.

    `asked` holds what the agent wanted of sampling and did not get, `sampling` what was used. `delivered`: the whole
    answer was sent. `superseded`: the agent repeated the request and went on with another answer; never trained.
    `text` is the output as text with everything in it; reasoning, content and tool_calls are what the agent was given.
    """

    id: str
    parent: str = ""
    fork: str = ""
    role: CallRole = "main"
    dialect: Dialect
    model: str
    prompt_ids: Ids
    output_ids: Ids
    logprobs: tuple[float, ...]
    weight_versions: tuple[VersionSpan, ...]
    finish_reason: Literal["stop", "length", "tool_calls"]
    text: str
    reasoning: str = ""
    content: str = ""
    tool_calls: tuple[RecordedToolCall, ...] = ()
    sampling: Sampling
    asked: dict[str, Any] = {}
    findings: tuple[str, ...] = ()
    delivered: bool = False
    superseded: bool = False
    started_at: float
    seconds: float


class SessionChain(Wire):
    """Calls whose tokens extend each other. `fork_at` is the position of `chain.ids` where it leaves another chain
    (None: it shares no first token with one, or is the first); `truncated`: its last output met its limit."""

    chain: Chain
    calls: tuple[str, ...]
    role: CallRole
    fork: str = ""
    fork_at: int | None = None
    truncated: bool = False


class Session(Wire):
    """A session with its calls in the order of their answers, and the chains made of those that count."""

    id: Name
    purpose: str
    created_at: float
    active: int = 0
    calls: tuple[CallRecord, ...] = ()
    chains: tuple[SessionChain, ...] = ()
    findings: dict[str, int] = {}


class SessionLine(Wire):
    """A session at a glance."""

    id: Name
    purpose: str
    created_at: float
    active: int
    calls: int
    output_tokens: int


class SessionPage(Wire):
    """All sessions, the newest first."""

    sessions: Annotated[tuple[SessionLine, ...], Field(max_length=1_000_000)]
