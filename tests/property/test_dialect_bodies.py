"""The gateway's dialects: no body makes them fail in another way, and answers survive the way there and back."""

from __future__ import annotations

import json
from types import ModuleType
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.dialects import BODIES, DIALECTS, HI, RECORD, answered, asked, echoed, gathered, said

from inference_space.gateway.turns import Answer, Asked, ToolCall
from sync.errors import InvalidRequest

pytestmark = pytest.mark.property

NAMES = sorted({
    "model", "messages", "input", "system", "instructions", "role", "content", "type", "text", "tools", "tool_choice",
    "function", "name", "parameters", "input_schema", "arguments", "tool_calls", "id", "call_id", "tool_use_id", "stop",
    "stop_sequences", "temperature", "max_tokens", "seed", "stream", "stream_options", "thinking", "signature",
    "encrypted_content", "summary", "output", "reasoning", "reasoning_content", "n", "top_p", "logit_bias", "format",
    "output_config", "logprobs", "tool_call_id", "__unparsedToolInput", "raw", "data", "refusal", "audio",
})  # fmt: skip
WORDS = [
    "user", "assistant", "system", "developer", "tool", "function", "custom", "namespace", "text", "input_text",
    "tool_use", "tool_result", "thinking", "reasoning", "function_call", "function_call_output", "custom_tool_call",
    "auto", "required", "any", "", "<think>", "<think></think>", RECORD, "f", "image", "\ud800", "é\u2028",
]  # fmt: skip
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from(WORDS),
    st.integers(-2, 5),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
)
KEYS = st.one_of(st.sampled_from(NAMES), st.text(max_size=4))
JSON = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=5), max_leaves=8
)
OBJECTS = st.dictionaries(KEYS, JSON, max_size=4)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of everything inside a body."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path] * bool(path) + [found for key, item in inner for found in places(item, (*path, key))]


def changed(body: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    """A copy of a body with another value at a path; without one when the value is `places` itself."""
    copy = json.loads(json.dumps(body))
    at = copy
    for key in path[:-1]:
        at = at[key]
    if value is places:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    return dict(copy)


def read(module: ModuleType, body: dict[str, Any]) -> Asked | InvalidRequest:
    try:
        found: Asked = module.parse(body, {})
    except InvalidRequest as error:
        return error
    return found


def refused_or_usable(dialect: str, body: dict[str, Any]) -> None:
    """A body is refused with words that can be sent, or understood and answered."""
    module = DIALECTS[dialect]
    found = read(module, body)
    if isinstance(found, InvalidRequest):
        told = module.error(found.status, found.code, str(found))
        assert json.dumps(told, ensure_ascii=False, allow_nan=False).encode()
        assert (found.status, found.code in ("invalid_request", "unsupported", "empty_prompt")) == (400, True)
        assert len(str(found)) < 2_000
        return
    assert found.turns
    assert [turn.role for turn in found.turns[:2]] != ["system", "system"]
    for one, two in zip(found.turns, found.turns[1:], strict=False):
        apart = one.record and two.record and one.record != two.record
        assert (one.role, two.role) != ("assistant", "assistant") or apart
    for turn in found.turns:
        f"{turn.text}{turn.reasoning}{turn.name}{turn.call_id}{turn.calls}".encode()
    json.dumps([tool.parameters for tool in found.tools], ensure_ascii=False, allow_nan=False).encode()
    json.dumps(found.dropped, allow_nan=False)
    made = answered(pieces=("a", "b", "c"))
    assert json.dumps(module.answer(found, made), allow_nan=False)
    assert said([module.opening(found, RECORD), *module.events(found, made)])


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(sorted(DIALECTS)), OBJECTS)
def test_any_json_is_refused_or_usable(dialect: str, body: dict[str, Any]) -> None:
    refused_or_usable(dialect, body)


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(sorted(DIALECTS)), st.lists(OBJECTS, min_size=1, max_size=2), st.data())
def test_any_messages_are_refused_or_usable(dialect: str, items: list[dict[str, Any]], data: st.DataObject) -> None:
    roles = st.sampled_from(["user", "assistant", "system", "tool"])
    spoken = [{"role": data.draw(roles), "content": "x"} | item for item in items]
    refused_or_usable(dialect, {"input" if dialect == "responses" else "messages": [HI, *spoken]})


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted(BODIES)), st.data())
def test_changed_bodies_of_programs_are_refused_or_usable(program: str, data: st.DataObject) -> None:
    dialect, body = BODIES[program]
    for _ in range(data.draw(st.integers(1, 3))):
        path = data.draw(st.sampled_from(places(body)))
        body = changed(body, path, data.draw(st.one_of(st.just(places), LEAVES, JSON)))
        try:
            json.loads(json.dumps(body))
        except ValueError:
            break
    refused_or_usable(dialect, body)


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(sorted(DIALECTS)), st.integers(50, 400), st.sampled_from(["list", "object", "tools", "parts"]))
def test_nesting_of_any_depth_is_refused_or_usable(dialect: str, depth: int, kind: str) -> None:
    inner: Any = "x"
    for _ in range(depth):
        inner = [inner] if kind == "list" else {"type": "text", "content": inner}
    where = "input" if dialect == "responses" else "messages"
    tool = {"type": "function", "name": "f", "parameters": inner, "input_schema": inner, "function": inner}
    body = {
        "tools": {where: [HI], "tools": [tool]},
        "parts": {where: [{"role": "user", "content": [inner]}]},
    }.get(kind, {where: [HI], "x": inner})
    refused_or_usable(dialect, body)


# --- there and back -----------------------------------------------------------------------------------------------

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=400)
OBJECT = st.dictionaries(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=4),
    st.one_of(TEXTS, st.integers(-(2**53), 2**53), st.booleans(), st.none(), st.lists(st.integers(0, 9), max_size=3)),
    max_size=4,
)
SPACED = st.builds(
    lambda value, ascii_only, gap: json.dumps(value, ensure_ascii=ascii_only, separators=(gap + ",", ":" + gap)),
    OBJECT, st.booleans(), st.sampled_from(["", " ", "\n"]),
)  # fmt: skip


@st.composite
def answers(draw: st.DrawFn) -> Answer:
    arguments = draw(st.lists(SPACED, max_size=3))
    calls = tuple(ToolCall(f"call_{n:024x}", "bash", text) for n, text in enumerate(arguments))
    finish = draw(st.sampled_from(["length", "tool_calls" if calls else "stop"]))
    return answered(text=draw(TEXTS), reasoning=draw(TEXTS), calls=calls, finish=finish)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted(DIALECTS)), answers(), st.booleans(), st.booleans())
def test_an_answer_sent_back_is_the_turn_that_was_said(dialect: str, made: Answer, redump: bool, plain: bool) -> None:
    assume(not made.text.startswith("<think>"))
    module = DIALECTS[dialect]
    body = json.loads(json.dumps(module.answer(asked(), made)))
    back = echoed(dialect, body, redump=redump, plain=plain)
    where = "input" if dialect == "responses" else "messages"
    turns = module.parse({where: [HI, *back]}, {}).turns
    turn = turns[-1]
    assert len(turns) == 2
    assert (turn.role, turn.text, turn.reasoning) == ("assistant", made.text, made.reasoning)
    assert [(c.id, c.name) for c in turn.calls] == [(c.id, c.name) for c in made.calls]
    assert [json.loads(c.arguments) for c in turn.calls] == [json.loads(c.arguments) for c in made.calls]
    if dialect != "messages" and not redump:
        assert turn.calls == made.calls
    assert turn.record == (RECORD if dialect != "chat" and made.reasoning else "")


@settings(max_examples=150, deadline=None)
@given(answers())
def test_streams_add_up_to_the_answer(made: Answer) -> None:
    wants = asked()
    assert gathered(DIALECTS["messages"].events(wants, made)) == DIALECTS["messages"].answer(wants, made)

    body = DIALECTS["responses"].answer(wants, made)
    events = said(DIALECTS["responses"].events(wants, made))
    assert events[-1]["response"] == body
    assert [e["item"] for e in events if e["type"] == "response.output_item.done"] == body["output"]
    deltas = {item["id"]: "" for item in body["output"]}
    for event in events:
        if event["type"].endswith(".delta"):
            deltas[event["item_id"]] += event["delta"]
    sent = [made.reasoning] * bool(made.reasoning) + [made.text] * (bool(made.text) or not made.calls)
    assert list(deltas.values()) == sent + [call.arguments for call in made.calls]

    message: dict[str, Any] = {}
    calls: dict[int, dict[str, Any]] = {}
    for chunk in said(DIALECTS["chat"].events(wants, made)):
        for choice in chunk["choices"]:
            for name, value in choice["delta"].items():
                if name == "tool_calls":
                    for part in value:
                        call = calls.setdefault(part.pop("index"), part)
                        if call is not part:
                            call["function"]["arguments"] += part["function"]["arguments"]
                else:
                    begun = name in ("content", "reasoning_content") and message.get(name) is not None
                    message[name] = message[name] + value if begun else value
    whole = DIALECTS["chat"].answer(wants, made)["choices"][0]["message"]
    assert message | ({"tool_calls": list(calls.values())} if calls else {}) == whole
