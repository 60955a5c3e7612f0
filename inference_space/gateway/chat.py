"""OpenAI's chat completions: from a body to what was asked, from an answer to a body or a stream. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from .fields import Conversation, Fields, checked, choose, key_of, openai_error, pieces, sse, unique
from .turns import Answer, Asked, Tool, ToolCall, Turn

PING = b": ping\n\n"
"""A comment; it keeps the connection open and is no event."""
_DONE = b"data: [DONE]\n\n"
_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
_REFUSED: dict[str, tuple[Any, ...]] = {
    "n": (1,), "best_of": (1,), "functions": ([],), "function_call": ("none", "auto"), "top_logprobs": (0,),
    "response_format": ({"type": "text"},), "modalities": (["text"],), "audio": (), "prediction": (),
    "guided_json": (), "guided_regex": (), "guided_choice": (), "guided_grammar": (), "structured_outputs": ({},),
}  # fmt: skip


def parse(body: dict[str, Any], headers: Mapping[str, str]) -> Asked:  # noqa: ARG001
    """What a body asks. Unknown fields are ignored; parameters of sampling without effect are in `dropped`.

    Raises InvalidRequest naming the field, with code "unsupported" for what is understood and not possible here.
    """
    fields = Fields(checked(body))
    fields.refuse_any(_REFUSED)
    tools = _tools(fields)
    stream = fields.flag("stream")
    options = fields.inner("stream_options")
    longest = fields.whole("max_completion_tokens", 1)
    return Asked(
        model=fields.text("model") or "policy",
        turns=_turns(fields),
        tools=tools,
        stream=stream,
        temperature=fields.temperature(),
        seed=fields.whole("seed", 0),
        limit=longest if longest is not None else fields.whole("max_tokens", 1),
        stop=fields.stops("stop"),
        choice=choose(_choice(fields), tools),
        parallel=fields.flag("parallel_tool_calls", default=True),
        usage=not stream or (options is not None and options.flag("include_usage")),
        logprobs=fields.flag("logprobs"),
        dropped=fields.dropped(),
    )


def _turns(fields: Fields) -> tuple[Turn, ...]:
    found = Conversation()
    for message in fields.items("messages"):
        role, text = message.text("role"), message.content("content", _PARTS)
        if role in ("system", "developer"):
            found.system(text)
        elif role == "user":
            found.add(Turn("user", text))
        elif role == "assistant":
            found.add(_reply(message, text))
        elif role == "tool":
            found.add(Turn("tool", text, call_id=message.text("tool_call_id"), name=message.text("name")))
        else:
            message.unsupported("role", "possible are system, developer, user, assistant and tool")
    return found.turns()


def _reply(message: Fields, text: str) -> Turn:
    message.refuse_any({"function_call": (), "audio": ()}, "send tool_calls and text")
    calls = []
    for call in message.items("tool_calls"):
        function = call.inner("function")
        if function is None or call.text("type") not in ("", "function"):
            call.unsupported("type", "send calls of functions")
        calls.append(ToolCall(call.named("id"), function.named("name"), function.text("arguments")))
    reasoning = message.text("reasoning_content") or message.text("reasoning")
    return Turn("assistant", text or message.text("refusal"), reasoning, tuple(calls))


def _tools(fields: Fields) -> tuple[Tool, ...]:
    """Functions; hosted tools (web search and the like) are left out, as nothing here runs them."""
    found = []
    for tool in fields.items("tools"):
        if tool.text("type") == "custom":
            tool.unsupported("type", "offer a function with one text parameter")
        function = tool.inner("function")
        if function is not None:
            found.append(function.function("parameters"))
        elif tool.text("type") == "function":
            tool.refuse("function", "must be an object with name and parameters")
    return unique(found)


def _choice(fields: Fields) -> str:
    value = fields.get("tool_choice")
    if value in (None, "auto", "none", "required"):
        return value or "auto"
    choice = fields.inner("tool_choice") if isinstance(value, dict) else None
    function = choice.inner("function") if choice is not None and choice.text("type") == "function" else None
    if function is None:
        fields.unsupported("tool_choice", "possible are auto, none, required and one function")
    return f"name:{function.named('name')}"


def opening(asked: Asked, record: str) -> bytes:  # noqa: ARG001
    """Nothing: the first chunk names the model and the version that answered."""
    return b""


def answer(asked: Asked, answer: Answer) -> dict[str, Any]:
    """The completion object, with `weight_version`: the newest version that sampled a token of it."""
    message: dict[str, Any] = {"role": "assistant", "content": _content(answer), "refusal": None}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.calls:
        message["tool_calls"] = [_call(call) for call in answer.calls]
    choice = {
        "index": 0,
        "message": message,
        "finish_reason": answer.finish,
        "logprobs": _logprobs(answer) if asked.logprobs else None,
    }
    return {**_head(answer, "chat.completion"), "choices": [choice], "usage": _usage(answer)}


def events(asked: Asked, answer: Answer) -> Iterator[bytes]:
    """The stream: role, reasoning, text, calls, finish, usage if it was asked for, [DONE]; logprobs all at once."""
    logprobs = _logprobs(answer) if asked.logprobs else None
    first = {"role": "assistant", "content": "" if _content(answer) is not None else None, "refusal": None}
    yield _chunk(answer, first, logprobs=logprobs)
    for piece in pieces(answer.reasoning):
        yield _chunk(answer, {"reasoning_content": piece})
    for piece in pieces(answer.text):
        yield _chunk(answer, {"content": piece})
    for index, call in enumerate(answer.calls):
        opened = _call(call)
        opened["function"]["arguments"] = ""
        yield _chunk(answer, {"tool_calls": [{"index": index, **opened}]})
        for piece in pieces(call.arguments):
            yield _chunk(answer, {"tool_calls": [{"index": index, "function": {"arguments": piece}}]})
    yield _chunk(answer, {}, finish=answer.finish)
    if asked.usage:
        yield sse({**_head(answer, "chat.completion.chunk"), "choices": [], "usage": _usage(answer)})
    yield _DONE


def error(status: int, code: str, message: str) -> dict[str, Any]:
    """An error's body as OpenAI's clients expect it."""
    return openai_error(status, code, message)


def error_event(status: int, code: str, message: str, record: str = "") -> bytes:  # noqa: ARG001
    """An error inside a stream that has begun; it ends the stream."""
    return sse(openai_error(status, code, message))


def _head(answer: Answer, kind: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{key_of(answer.record)}",
        "object": kind,
        "created": answer.created,
        "model": answer.model,
        "weight_version": answer.version,
    }


def _chunk(
    answer: Answer, delta: dict[str, Any], *, finish: str | None = None, logprobs: dict[str, Any] | None = None
) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": logprobs}
    return sse({**_head(answer, "chat.completion.chunk"), "choices": [choice]})


def _content(answer: Answer) -> str | None:
    return answer.text if answer.text or not answer.calls else None


def _call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _logprobs(answer: Answer) -> dict[str, Any]:
    pairs = zip(answer.pieces, answer.logprobs, strict=True)
    content = [{"token": t, "logprob": p, "bytes": list(t.encode()), "top_logprobs": []} for t, p in pairs]
    return {"content": content, "refusal": None}


def _usage(answer: Answer) -> dict[str, Any]:
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": len(answer.output_ids),
        "total_tokens": answer.prompt_tokens + len(answer.output_ids),
        "prompt_tokens_details": {"cached_tokens": answer.cached_tokens},
    }
