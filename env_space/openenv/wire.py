"""What OpenEnv 0.10 says on the wire: bodies, frames and their errors, as far as this package speaks it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import PydanticSerializationError, to_json

from sync.errors import InvalidRequest
from sync.schema.calls import Message

VERSION = "1.0.0"
"""The version of the HTTP standard that OpenEnv 0.10 checks for (its profile openenv-http/1.x)."""
SPLIT = "train"
"""The one split of our environments."""

Seed = Annotated[int, Field(strict=True, ge=0, le=2**63 - 1)]
Metadata = dict[str, Any]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class MessageAction(_Strict):
    """What the policy says in this turn."""

    message: str = Field(max_length=4_194_304)
    metadata: Metadata = {}


class ListTools(_Strict):
    """Ask for the tools; needs no episode."""

    type: Literal["list_tools"]
    metadata: Metadata = {}


class CallTool(_Strict):
    """Call one tool of the environment; not a turn."""

    type: Literal["call_tool"]
    tool_name: str = Field(min_length=1, max_length=128)
    arguments: dict[str, Any] = {}
    metadata: Metadata = {}


Action = MessageAction | ListTools | CallTool
TEXT_ACTION: TypeAdapter[Action] = TypeAdapter(MessageAction)
TOOL_ACTION: TypeAdapter[Action] = TypeAdapter(Action)


class Observation(_Strict):
    """What the environment says: the new messages, and their contents joined by newlines."""

    messages: list[Message]
    message: str
    metadata: Metadata = {}


class State(_Strict):
    """Where a session stands; `episode_id` is None before its first reset."""

    episode_id: str | None = None
    step_count: int = 0
    tool_calls: int = 0
    environment: str
    task: str | None = None
    done: bool = False
    session_id: str | None = None


class ResetOptions(BaseModel):
    """`data` of a reset. Unknown names are left out and named in the metadata, as OpenEnv's own server leaves them out.

    The task is `task` (a key, or an item of the task API), else `index` of `split`, else drawn by `seed`. Without a
    seed one is drawn, and told in the metadata.
    """

    model_config = ConfigDict(extra="allow", frozen=True)

    seed: Seed | None = None
    episode_id: str | None = Field(default=None, min_length=1, max_length=255)
    task: str | dict[str, Any] | None = None
    split: str | None = Field(default=None, max_length=128)
    index: Annotated[int, Field(strict=True)] | None = None


class StepBody(BaseModel):
    """POST /step. `session_id` names a session of `openenv/session/create`; without one there is no episode to step."""

    model_config = ConfigDict(extra="allow", frozen=True)

    action: dict[str, Any]
    timeout_s: float | None = Field(default=None, gt=0, le=86_400)
    request_id: str | None = Field(default=None, max_length=255)
    session_id: str | None = Field(default=None, max_length=64)


class SplitBody(_Strict):
    """POST /{environment}/tasks and num_tasks."""

    split: str = Field(max_length=128)


class TaskBody(SplitBody):
    """POST /{environment}/task."""

    index: int


class RangeBody(SplitBody):
    """POST /{environment}/task_range: [start, stop)."""

    start: int | None = None
    stop: int | None = None


class Rpc(_Strict):
    """A JSON-RPC 2.0 request, or a notification where `id` was not sent."""

    jsonrpc: Literal["2.0"]
    method: str = Field(max_length=128)
    params: dict[str, Any] = {}
    id: str | int | None = None


def execution_error(message: str) -> InvalidRequest:
    """The environment raised, was too slow, or answered what cannot be sent."""
    return InvalidRequest(message, status=500, code="EXECUTION_ERROR")


def session_error(message: str, status: int = 409) -> InvalidRequest:
    """There is no session or episode that could do this."""
    return InvalidRequest(message, status=status, code="SESSION_ERROR")


def invalid(error: ValidationError, what: str) -> InvalidRequest:
    """The first thing wrong in a body, by name."""
    first: Any = error.errors(include_url=False, include_context=False, include_input=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    return InvalidRequest(f"{what}: {where + ': ' if where else ''}{first['msg']}", code="VALIDATION_ERROR")


def encoded(data: dict[str, Any], limit: int) -> str:
    """`data` as JSON. Raises InvalidRequest EXECUTION_ERROR when it is no valid text, or longer than `limit`."""
    try:
        text = to_json(data).decode()
    except PydanticSerializationError as error:
        raise execution_error(f"the answer of the environment is not valid text: {error}") from None
    if len(text) > limit:
        found = f"the answer of the environment has {len(text)} characters, at most {limit} may be sent"
        raise execution_error(f"{found} (setting openenv.max_frame_bytes)")
    return text


def error_frame(error: InvalidRequest, **facts: Any) -> str:
    """An error as a frame of the episode socket."""
    return to_json({"type": "error", "data": {"message": str(error), "code": error.code, **facts}}).decode()
