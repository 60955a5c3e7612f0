"""OpenAI's responses: from a body to what was asked, from an answer to a body or a stream. Pure but for the clock of
`opening`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

from .fields import (
    Conversation,
    Fields,
    call_of,
    checked,
    choose,
    dumped,
    key_of,
    openai_error,
    pieces,
    plain_object,
    recorded,
    sse,
    unique,
)
from .turns import Answer, Asked, Tool, ToolCall, Turn

PING = b": ping\n\n"
"""A comment; it keeps the connection open and is no event."""
_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
_THOUGHTS = {"summary_text": "text", "reasoning_text": "text", "text": "text"}
_REFUSED: dict[str, tuple[Any, ...]] = {
    "n": (1,), "background": (False,), "previous_response_id": (), "conversation": (), "prompt": (),
    "top_logprobs": (0,), "prediction": (), "modalities": (["text"],), "audio": (),
}  # fmt: skip
Item = dict[str, Any]


class Freeform(dict[str, Any]):
    """The schema of a function that stands for a custom tool, whose calls carry plain text."""


_FREEFORM = Freeform(type="object", properties={"input": {"type": "string"}}, required=["input"])


def parse(body: dict[str, Any], headers: Mapping[str, str]) -> Asked:  # noqa: ARG001
    """What a body asks. Unknown fields are ignored; parameters of sampling without effect are in `dropped`.

    Raises InvalidRequest naming the field, with code "unsupported" for what is understood and not possible here.
    """
    fields = Fields(checked(body))
    fields.refuse_any(_REFUSED)
    form = fields.inner("text")
    if form is not None:
        form.refuse_any({"format": ({"type": "text"},)}, "answers are plain text")
    tools = _tools(fields)
    return Asked(
        model=fields.text("model") or "policy",
        turns=_turns(fields),
        tools=tools,
        stream=fields.flag("stream"),
        temperature=fields.temperature(),
        seed=fields.whole("seed", 0),
        limit=fields.whole("max_output_tokens", 1),
        stop=fields.stops("stop"),
        choice=choose(_choice(fields), tools),
        parallel=fields.flag("parallel_tool_calls", default=True),
        dropped=fields.dropped(),
    )


def _turns(fields: Fields) -> tuple[Turn, ...]:
    found = Conversation()
    found.system(fields.content("instructions", _PARTS))
    if isinstance(fields.get("input"), str):
        if fields.text("input"):
            found.add(Turn("user", fields.text("input")))
        return found.turns()
    for item in fields.items("input"):
        kind = item.text("type") or "message"
        if kind == "message":
            _message(found, item)
        elif kind == "reasoning":
            found.add(Turn("assistant", reasoning=_thought(item), record=recorded(item.text("encrypted_content"))))
        elif kind == "function_call":
            found.add(Turn("assistant", calls=(call_of(item, id_at="call_id"),)))
        elif kind == "custom_tool_call":
            arguments = dumped({"input": item.text("input")})
            found.add(Turn("assistant", calls=(ToolCall(item.named("call_id"), item.named("name"), arguments),)))
        elif kind in ("function_call_output", "custom_tool_call_output"):
            found.add(Turn("tool", item.content("output", _PARTS), call_id=item.named("call_id")))
        else:
            item.unsupported("type", "send messages, reasoning, calls of functions and their outputs")
    return found.turns()


def _message(found: Conversation, item: Fields) -> None:
    role, text = item.text("role"), item.content("content", _PARTS)
    if role in ("system", "developer"):
        found.system(text)
    elif role == "user":
        found.add(Turn("user", text))
    elif role == "assistant":
        found.add(Turn("assistant", text))
    else:
        item.unsupported("role", "possible are system, developer, user and assistant")


def _thought(item: Fields) -> str:
    """The whole reasoning where an item has it, else its summary: here the summary is the whole."""
    return item.content("content", _THOUGHTS) or item.content("summary", _THOUGHTS)


def _tools(fields: Fields) -> tuple[Tool, ...]:
    """Functions, those of namespaces, and custom tools as functions of one text.

    Hosted tools (web search and the like) are left out, as nothing here runs them.
    """
    found = []
    for tool in fields.items("tools"):
        if tool.text("type") == "namespace":
            for inner in tool.items("tools"):
                found.extend(_declared(inner, tool.named("name")))
        else:
            found.extend(_declared(tool, ""))
    return unique(found)


def _declared(tool: Fields, namespace: str) -> list[Tool]:
    kind = tool.text("type")
    if kind == "function":
        return [tool.function("parameters", namespace=namespace)]
    if kind == "custom":
        return [Tool(tool.named("name"), tool.text("description"), _FREEFORM, namespace)]
    return []


def _choice(fields: Fields) -> str:
    value = fields.get("tool_choice")
    if value in (None, "auto", "none", "required"):
        return value or "auto"
    choice = fields.inner("tool_choice") if isinstance(value, dict) else None
    if choice is None or choice.text("type") not in ("function", "custom"):
        fields.unsupported("tool_choice", "possible are auto, none, required and one function")
    return f"name:{choice.named('name')}"


def opening(asked: Asked, record: str) -> bytes:
    """response.created and response.in_progress: what a stream can say before there is an answer."""
    response = _response(asked, f"resp_{key_of(record)}", int(time.time()), "in_progress", asked.model)
    kinds = ("response.created", "response.in_progress")
    return b"".join(_event(n, kind, response=response) for n, kind in enumerate(kinds))


def answer(asked: Asked, answer: Answer) -> dict[str, Any]:
    """The response object, with `weight_version`: the newest version that sampled a token of it.

    Items: reasoning (its opaque field is the record's id) if there is any, a message if there is text or no call,
    then the calls. An answer that met its limit is incomplete, and so is its last item.
    """
    return _finished(asked, answer)


def _finished(asked: Asked, answer: Answer) -> dict[str, Any]:
    cut = answer.finish == "length"
    status = "incomplete" if cut else "completed"
    response = _response(asked, f"resp_{key_of(answer.record)}", answer.created, status, answer.model)
    return response | {
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": _items(asked, answer),
        "usage": {
            "input_tokens": answer.prompt_tokens,
            "input_tokens_details": {"cached_tokens": answer.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": len(answer.output_ids),
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": answer.prompt_tokens + len(answer.output_ids),
        },
        "weight_version": answer.version,
    }


def events(asked: Asked, answer: Answer) -> Iterator[bytes]:
    """The stream after `opening`: each item added, in deltas, and done; then the whole response."""
    number = 2
    for index, item in enumerate(_items(asked, answer)):
        for kind, more in _item_events(item):
            yield _event(number, kind, output_index=index, **more)
            number += 1
    response = _finished(asked, answer)
    yield _event(number, f"response.{response['status']}", response=response)


def error(status: int, code: str, message: str) -> dict[str, Any]:
    """An error's body as OpenAI's clients expect it."""
    return openai_error(status, code, message)


def error_event(status: int, code: str, message: str, record: str = "") -> bytes:
    """response.failed inside the stream whose `opening` named `record`; it ends the stream."""
    found = openai_error(status, code, message)["error"]
    response = _response(None, f"resp_{key_of(record)}", int(time.time()), "failed", "")
    told = {"code": _FAILURES.get(found["type"], found["code"]), "message": message}
    return _event(2, "response.failed", response=response | {"error": told})


_FAILURES = {"server_error": "server_error", "rate_limit_error": "rate_limit_exceeded"}


def _event(number: int, kind: str, **more: Any) -> bytes:
    return sse({"type": kind, "sequence_number": number, **more}, kind)


def _response(asked: Asked | None, name: str, created: int, status: str, model: str) -> dict[str, Any]:
    choice = asked.choice if asked else "auto"
    named = {"type": "function", "name": choice[5:]} if choice.startswith("name:") else choice
    return {
        "id": name,
        "object": "response",
        "created_at": created,
        "status": status,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "metadata": {},
        "model": model,
        "output": [],
        "parallel_tool_calls": asked.parallel if asked else True,
        "temperature": asked.temperature if asked else None,
        "tool_choice": named,
        "tools": [],
        "top_p": None,
        "max_output_tokens": asked.limit if asked else None,
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "store": False,
        "text": {"format": {"type": "text"}},
        "truncation": "disabled",
        "usage": None,
    }


def _items(asked: Asked, answer: Answer) -> list[Item]:
    key = key_of(answer.record)
    found: list[Item] = []
    if answer.reasoning:
        summary = [{"type": "summary_text", "text": answer.reasoning}]
        opaque = answer.record
        found.append({"id": f"rs_{key}", "type": "reasoning", "summary": summary, "encrypted_content": opaque})
    if answer.text or not answer.calls:
        content = [{"type": "output_text", "text": answer.text, "annotations": [], "logprobs": []}]
        found.append({"id": f"msg_{key}", "type": "message", "role": "assistant", "content": content})
    tools = {tool.name: tool for tool in asked.tools}
    found.extend(_call(f"{key}_{n}", call, tools.get(call.name)) for n, call in enumerate(answer.calls))
    for item in found[1:] if answer.reasoning else found:
        item["status"] = "completed"
    if answer.finish == "length":
        found[-1]["status"] = "incomplete"
    return found


def _call(key: str, call: ToolCall, tool: Tool | None) -> Item:
    common = {"call_id": call.id, "name": call.name}
    if tool is not None and tool.namespace:
        common["namespace"] = tool.namespace
    if tool is not None and isinstance(tool.parameters, Freeform):
        given = (plain_object(call.arguments) or {}).get("input")
        text = given if isinstance(given, str) else call.arguments
        return {"id": f"ctc_{key}", "type": "custom_tool_call", **common, "input": text}
    return {"id": f"fc_{key}", "type": "function_call", **common, "arguments": call.arguments}


def _item_events(item: Item) -> Iterator[tuple[str, dict[str, Any]]]:
    """The events of one item as kind and fields, without the index."""
    at = {"item_id": item["id"]}
    begun = item | ({"status": "in_progress"} if "status" in item else {})
    if item["type"] == "message":
        yield "response.output_item.added", {"item": begun | {"content": []}}
        yield from _text_events({**at, "content_index": 0}, item["content"][0])
    elif item["type"] == "reasoning":
        yield "response.output_item.added", {"item": begun | {"summary": []}}
        yield from _summary_events({**at, "summary_index": 0}, item["summary"][0])
    else:
        custom = item["type"] == "custom_tool_call"
        kind, field = ("custom_tool_call_input", "input") if custom else ("function_call_arguments", "arguments")
        yield "response.output_item.added", {"item": begun | {field: ""}}
        for piece in pieces(item[field]):
            yield f"response.{kind}.delta", {**at, "delta": piece}
        name = {} if custom else {"name": item["name"]}
        yield f"response.{kind}.done", {**at, field: item[field], **name}
    yield "response.output_item.done", {"item": item}


def _text_events(at: dict[str, Any], part: Item) -> Iterator[tuple[str, dict[str, Any]]]:
    yield "response.content_part.added", {**at, "part": part | {"text": ""}}
    for piece in pieces(part["text"]):
        yield "response.output_text.delta", {**at, "delta": piece, "logprobs": []}
    yield "response.output_text.done", {**at, "text": part["text"], "logprobs": []}
    yield "response.content_part.done", {**at, "part": part}


def _summary_events(at: dict[str, Any], part: Item) -> Iterator[tuple[str, dict[str, Any]]]:
    yield "response.reasoning_summary_part.added", {**at, "part": part | {"text": ""}}
    for piece in pieces(part["text"]):
        yield "response.reasoning_summary_text.delta", {**at, "delta": piece}
    yield "response.reasoning_summary_text.done", {**at, "text": part["text"]}
    yield "response.reasoning_summary_part.done", {**at, "part": part}
