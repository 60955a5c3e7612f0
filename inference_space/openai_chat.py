"""OpenAI's chat completions: what one policy without tools can answer, and clear refusals of the rest."""

from __future__ import annotations

import time
import uuid
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from sync.errors import InvalidRequest
from sync.schema.calls import ErrorBody, Message, Sampling, Temperature

from .engines.base import Generation
from .render import text_of

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,), "stream": (False,), "tools": ([],), "functions": ([],), "stop": ([],), "top_p": (1,),
    "frequency_penalty": (0,), "presence_penalty": (0,), "logit_bias": ({},), "top_logprobs": (0,),
    "response_format": ({"type": "text"},), "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),     "stream_options": (), "store": (False,),
}  # fmt: skip
_IGNORED = ("user", "metadata", "safety_identifier", "service_tier", "prompt_cache_key")


class TextPart(BaseModel):
    """One part of a message's content; only text has a rendering."""

    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    """One message as OpenAI's clients write it."""

    model_config = ConfigDict(extra="forbid")
    role: Literal["system", "user", "assistant", "tool"]
    content: str | list[TextPart]


class ChatRequest(BaseModel):
    """What is understood; every other parameter must have its neutral value, see `chat_call`."""

    model_config = ConfigDict(extra="allow")
    model: str = "policy"
    messages: list[ChatMessage] = Field(min_length=1, max_length=4_096)
    temperature: Temperature | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    seed: int | None = Field(default=None, ge=0, le=2**63 - 1)
    logprobs: bool | None = None


class ChatCall(BaseModel):
    """A checked request: what to render, how to sample, and how to answer."""

    model: str
    messages: tuple[Message, ...]
    sampling: Sampling
    logprobs: bool


def chat_call(request: ChatRequest, max_len: int) -> ChatCall:
    """Check a request; without a limit on tokens the answer may fill `max_len`.

    Raises InvalidRequest naming the first parameter that this server cannot honour.
    """
    for name, value in (request.model_extra or {}).items():
        if value is None or name in _IGNORED:
            continue
        if name not in _NEUTRAL:
            raise InvalidRequest(f"{name}: this server does not know the parameter; leave it out", code="unsupported")
        if value not in _NEUTRAL[name]:
            raise InvalidRequest(f"{name}: {_short(value)} is not supported; leave it out", code="unsupported")
    limit = request.max_completion_tokens or request.max_tokens or max_len
    temperature = 1.0 if request.temperature is None else request.temperature
    sampling = Sampling(max_tokens=min(limit, max_len), temperature=temperature, seed=request.seed)
    messages = tuple(Message(role=m.role, content=_content(m.content)) for m in request.messages)
    return ChatCall(model=request.model, messages=messages, sampling=sampling, logprobs=bool(request.logprobs))


def chat_answer(call: ChatCall, prompt_ids: list[int], made: Generation, tokenizer: Any) -> dict[str, Any]:
    """The completion object, with `weight_version`: the newest version that sampled a token of it."""
    text = text_of(tokenizer, made.output_ids, ended=made.finish_reason == "stop")
    choice: dict[str, Any] = {
        "index": 0,
        "message": {"role": "assistant", "content": text},
        "finish_reason": made.finish_reason,
        "logprobs": None,
    }
    if call.logprobs:
        pairs = zip(made.output_ids, made.logprobs, strict=True)
        choice["logprobs"] = {"content": [_logprob(tokenizer, token, value) for token, value in pairs]}
    return {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": call.model,
        "choices": [choice],
        "usage": {
            "prompt_tokens": len(prompt_ids),
            "completion_tokens": len(made.output_ids),
            "total_tokens": len(prompt_ids) + len(made.output_ids),
        },
        "weight_version": made.spans[-1].version,
    }


def openai_error(status: int, body: ErrorBody) -> dict[str, Any]:
    """An error as OpenAI's clients expect it; the parameter is what the message has before the colon, if any."""
    kind = "invalid_request_error" if 400 <= status < 500 else "server_error"
    head, colon, _ = body.message.partition(":")
    param = head if colon and head.replace(".", "").replace("_", "").isalnum() else None
    return {"error": {"message": body.message, "type": kind, "param": param, "code": body.code}}


def _content(content: str | list[TextPart]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


def _logprob(tokenizer: Any, token: int, value: float) -> dict[str, Any]:
    text = tokenizer.decode([token], skip_special_tokens=False)
    return {"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []}


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
