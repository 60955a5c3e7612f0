"""Anthropic's messages: from a body to what was asked, from an answer to a body or a stream. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from sync.schema.calls import TOO_LONG_CODES

from .fields import Conversation, Fields, checked, choose, dumped, key_of, pieces, plain_object, recorded, sse, unique
from .turns import Answer, Asked, Tool, ToolCall, Turn

PING = b'event: ping\ndata: {"type":"ping"}\n\n'
"""The dialect's own event that means nothing."""
_TEXT = {"text": "text"}
_RESULT = {"text": "text", "tool_reference": "tool_name"}
_UNPARSED = "__unparsedToolInput"
_REFUSED: dict[str, tuple[Any, ...]] = {"n": (1,), "output_format": (), "prediction": ()}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
Block = dict[str, Any]


def parse(body: dict[str, Any], headers: Mapping[str, str]) -> Asked:  # noqa: ARG001
    """What a body asks; without `max_tokens` too, as when tokens are to be counted. Unknown fields are ignored;
    parameters of sampling without effect are in `dropped`.

    Raises InvalidRequest naming the field, with code "unsupported" for what is understood and not possible here.
    """
    fields = Fields(checked(body))
    fields.refuse_any(_REFUSED)
    form = fields.inner("output_config")
    if form is not None:
        form.refuse_any({"format": ({"type": "text"},)}, "answers are plain text")
    tools = _tools(fields)
    choice = fields.inner("tool_choice")
    return Asked(
        model=fields.text("model") or "policy",
        turns=_turns(fields),
        tools=tools,
        stream=fields.flag("stream"),
        temperature=fields.temperature(),
        seed=fields.whole("seed", 0),
        limit=fields.whole("max_tokens", 1),
        stop=fields.stops("stop_sequences"),
        choice=choose(_choice(choice), tools),
        parallel=choice is None or not choice.flag("disable_parallel_tool_use"),
        dropped=fields.dropped(),
    )


def _turns(fields: Fields) -> tuple[Turn, ...]:
    found = Conversation()
    found.system(fields.content("system", _TEXT))
    for message in fields.items("messages"):
        role = message.text("role")
        if role in ("system", "developer"):
            found.system(message.content("content", _TEXT))
        elif role == "user":
            _user(found, message)
        elif role == "assistant":
            _assistant(found, message)
        else:
            message.unsupported("role", "possible are user, assistant and system")
    return found.turns()


def _user(found: Conversation, message: Fields) -> None:
    """Results first, in their order; what else the message says is a turn behind them."""
    if not isinstance(message.get("content"), list):
        found.add(Turn("user", message.text("content")))
        return
    results, texts = 0, []
    for block in message.items("content"):
        if block.text("type") == "tool_result":
            found.add(Turn("tool", block.content("content", _RESULT), call_id=block.named("tool_use_id")))
            results += 1
        else:
            texts.append(block.part(_TEXT))
    text = "\n".join(filter(None, texts))
    if text or not results:
        found.add(Turn("user", text))


def _assistant(found: Conversation, message: Fields) -> None:
    if not isinstance(message.get("content"), list):
        found.add(Turn("assistant", message.text("content")))
        return
    blocks = message.items("content")
    for block in blocks:
        kind = block.text("type")
        if kind == "thinking":
            record = recorded(block.text("signature"))
            found.add(Turn("assistant", reasoning=block.text("thinking"), record=record))
        elif kind == "redacted_thinking":
            found.add(Turn("assistant", record=recorded(block.text("data"))))
        elif kind == "tool_use":
            found.add(Turn("assistant", calls=(ToolCall(block.named("id"), block.named("name"), _arguments(block)),)))
        else:
            found.add(Turn("assistant", block.part(_TEXT)))
    if not blocks:
        found.add(Turn("assistant"))


def _arguments(block: Fields) -> str:
    """The input as compact JSON; one that an agent could not parse and sends back as it was, as it was."""
    given = block.inner("input")
    if given is None:
        return "{}"
    if given.keys() == {_UNPARSED}:
        unparsed = given.inner(_UNPARSED)
        if unparsed is not None and unparsed.keys() == {"raw"}:
            return unparsed.text("raw")
    return dumped(block.get("input"))


def _tools(fields: Fields) -> tuple[Tool, ...]:
    """Functions; tools with a type of their own (web search, bash and the like) have no schema and are left out."""
    own = [tool for tool in fields.items("tools") if tool.text("type") in ("", "custom")]
    return unique([tool.function("input_schema") for tool in own])


def _choice(choice: Fields | None) -> str:
    if choice is None:
        return "auto"
    kind = choice.text("type")
    if kind == "tool":
        return f"name:{choice.named('name')}"
    if kind not in _CHOICES:
        choice.unsupported("type", "possible are auto, any, none and tool")
    return _CHOICES[kind]


def opening(asked: Asked, record: str) -> bytes:  # noqa: ARG001
    """Nothing: the first event already counts the prompt's tokens."""
    return b""


def answer(asked: Asked, answer: Answer) -> dict[str, Any]:  # noqa: ARG001
    """The message object, with `weight_version`: the newest version that sampled a token of it.

    Blocks: thinking (its signature is the record's id) if there is any, text if there is any, then the calls. The
    dialect has only objects as inputs: a call whose arguments are none becomes a block of text, NAME(ARGUMENTS).
    """
    content = [_whole(block) for block in _blocks(answer)]
    stop = _stop(answer, used=any(block["type"] == "tool_use" for block in content))
    return _head(answer) | {
        "content": content,
        **stop,
        "usage": _usage(answer, len(answer.output_ids)),
    }


def events(asked: Asked, answer: Answer) -> Iterator[bytes]:  # noqa: ARG001
    """The stream. A call's arguments are sent as they were sampled, an object or not: agents differ in what they do."""
    yield _event("message_start", message=_head(answer))
    blocks = _blocks(answer)
    for index, block in enumerate(blocks):
        yield _event("content_block_start", index=index, content_block=_begun(block))
        for delta in _deltas(block):
            yield _event("content_block_delta", index=index, delta=delta)
        yield _event("content_block_stop", index=index)
    yield _event(
        "message_delta", delta=_stop(answer, used=bool(answer.calls)), usage=_usage(answer, len(answer.output_ids))
    )
    yield _event("message_stop")


def error(status: int, code: str, message: str) -> dict[str, Any]:
    """An error's body as Anthropic's clients expect it."""
    kinds = {
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        413: "request_too_large",
        429: "rate_limit_error",
        503: "overloaded_error",
        504: "timeout_error",
        529: "overloaded_error",
    }
    kind = kinds.get(status, "api_error" if status >= 500 else "invalid_request_error")
    if code in TOO_LONG_CODES and not message.startswith("prompt is too long"):
        message = f"prompt is too long: {message}"
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": None}


def error_event(status: int, code: str, message: str, record: str = "") -> bytes:  # noqa: ARG001
    """An error inside a stream that has begun; it ends the stream."""
    return sse(error(status, code, message), "error")


def _event(kind: str, **more: Any) -> bytes:
    return sse({"type": kind, **more}, kind)


def _head(answer: Answer) -> dict[str, Any]:
    return {
        "id": f"msg_{key_of(answer.record)}",
        "type": "message",
        "role": "assistant",
        "model": answer.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "stop_details": None,
        "usage": _usage(answer, 0),
        "weight_version": answer.version,
    }


def _usage(answer: Answer, output: int) -> dict[str, Any]:
    """In this dialect the tokens read from a cache are not among the input tokens."""
    return {
        "input_tokens": answer.prompt_tokens - answer.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": answer.cached_tokens,
        "output_tokens": output,
    }


def _stop(answer: Answer, *, used: bool) -> dict[str, str | None]:
    if answer.finish == "length":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if used:
        return {"stop_reason": "tool_use", "stop_sequence": None}
    return {"stop_reason": "end_turn" if answer.stop is None else "stop_sequence", "stop_sequence": answer.stop}


def _blocks(answer: Answer) -> list[Block]:
    """Thinking, text and calls; the input of a call is still its text."""
    found: list[Block] = []
    if answer.reasoning:
        found.append({"type": "thinking", "thinking": answer.reasoning, "signature": answer.record})
    if answer.text:
        found.append({"type": "text", "text": answer.text})
    calls = ({"type": "tool_use", "id": c.id, "name": c.name, "input": c.arguments} for c in answer.calls)
    return [*found, *calls]


def _whole(block: Block) -> Block:
    if block["type"] != "tool_use":
        return block
    given = plain_object(block["input"])
    if given is None:
        return {"type": "text", "text": f"{block['name']}({block['input']})"}
    return block | {"input": given}


def _begun(block: Block) -> Block:
    empty: dict[str, Block] = {
        "thinking": {"thinking": "", "signature": ""},
        "text": {"text": ""},
        "tool_use": {"input": {}},
    }
    return block | empty[block["type"]]


def _deltas(block: Block) -> Iterator[Block]:
    if block["type"] == "text":
        for piece in pieces(block["text"]):
            yield {"type": "text_delta", "text": piece}
    elif block["type"] == "thinking":
        for piece in pieces(block["thinking"]):
            yield {"type": "thinking_delta", "thinking": piece}
        yield {"type": "signature_delta", "signature": block["signature"]}
    else:
        for piece in pieces(block["input"].strip() and block["input"]):
            yield {"type": "input_json_delta", "partial_json": piece}
