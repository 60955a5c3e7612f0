"""What all dialects have in common: a conversation, a request, an answer. Plain values, no I/O."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Role = Literal["system", "user", "assistant", "tool"]
Finish = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool. `arguments` is the text as it was sampled (or as an agent sent it back), JSON or not."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Turn:
    """One message. A dialect folds what the model knows as one turn into one: reasoning, text and calls of a reply.

    `reasoning` is what an agent sends back of it. `call_id` and `name` are a tool result's. `record` names the call
    that an agent says this turn came from (the opaque field of reasoning in responses and messages).
    """

    role: Role
    text: str = ""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    call_id: str = ""
    name: str = ""
    record: str = ""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call; `parameters` is its JSON schema. `namespace` is codex's, "" elsewhere: the
    name in the prompt is `name` alone."""

    name: str
    description: str = ""
    parameters: dict[str, Any] = field(default_factory=dict)
    namespace: str = ""


@dataclass(frozen=True, slots=True)
class Asked:
    """One request as an agent made it. `temperature` None: it named none. `limit` None: it named no number of tokens.

    `choice`: auto, none, required, or `name:NAME` for one tool. `dropped` are parameters that it sent with other than
    neutral values and that have no effect here: name → value, to become findings (or a refusal outside a session).
    `top_logprobs` None: no logprobs wanted in the answer.
    """

    model: str
    turns: tuple[Turn, ...]
    tools: tuple[Tool, ...] = ()
    stream: bool = False
    temperature: float | None = None
    seed: int | None = None
    limit: int | None = None
    stop: tuple[str, ...] = ()
    choice: str = "auto"
    parallel: bool = True
    usage: bool = True
    logprobs: bool = False
    dropped: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Answer:
    """What the policy said, parsed. `record` is the call's id (unique in the Space); `reasoning`, `text` and `calls`
    come from `output_ids`, which are the truth. `logprobs` pairs with `output_ids`; `pieces` is their text, id by id,
    set when the request wanted logprobs. `stop` is the stop text that ended it. `version`: newest weights in it."""

    record: str
    model: str
    created: int
    text: str
    reasoning: str
    calls: tuple[ToolCall, ...]
    finish: Finish
    prompt_tokens: int
    output_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    version: str
    cached_tokens: int = 0
    stop: str | None = None
    pieces: tuple[str, ...] = ()
