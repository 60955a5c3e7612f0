"""The gateway's dialects: what programs send, folded into turns; what they get, as their own SDKs read it."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import ModuleType
from typing import Any

import httpx2
import openai
import pytest
from support.dialects import (
    BODIES,
    CALL,
    DIALECTS,
    HI,
    RECORD,
    SECOND,
    SHELL,
    answered,
    asked,
    echoed,
    gathered,
    said,
)

from inference_space.gateway import chat, messages, responses
from inference_space.gateway.fields import MAX_DEPTH, MAX_ITEMS
from inference_space.gateway.turns import Answer, Asked, Tool, ToolCall, Turn
from sync.errors import InvalidRequest

pytestmark = pytest.mark.unit
PNG = "data:image/png;base64,AA=="
TEXT_ONLY = {"calls": (), "finish": "stop", "reasoning": ""}


def read(program: str, **more: Any) -> Asked:
    dialect, body = BODIES[program]
    found: Asked = DIALECTS[dialect].parse(body | more, {})
    return found


def ask(dialect: str, **more: Any) -> Asked:
    where = "input" if dialect == "responses" else "messages"
    found: Asked = DIALECTS[dialect].parse({"model": "m", where: [HI], **more}, {})
    return found


def refusal(dialect: str, **more: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        ask(dialect, **more)
    assert caught.value.status == 400
    return caught.value


# --- what programs send -------------------------------------------------------------------------------------------


def test_codex_is_folded_into_turns_and_flat_tools() -> None:
    found = read("codex")
    calls = (ToolCall("call_a", "exec_command", '{ "a" : 1.0 }'), ToolCall("call_b", "spawn_agent", "{}"))
    assert found.turns == (
        Turn("system", "rules\n\nmore rules"),
        Turn("user", "<environment>"),
        Turn("user", "task"),
        Turn("assistant", "I go.", "think", calls, record=RECORD),
        Turn("tool", "done", call_id="call_a", name="exec_command"),
        Turn("tool", "ok", call_id="call_b", name="spawn_agent"),
    )
    assert [(t.name, t.namespace) for t in found.tools] == [
        ("exec_command", ""),
        ("spawn_agent", "agents"),
        ("apply_patch", ""),
    ]
    assert found.tools[0].parameters == SHELL
    assert (found.stream, found.temperature, found.limit, found.dropped) == (True, None, None, {})


def test_claude_is_folded_with_results_in_the_order_given() -> None:
    found = read("claude")
    calls = (ToolCall("call_a", "Bash", '{"command":"é","n":10}'), ToolCall("call_b", "Bash", '{"c'))
    assert found.turns == (
        Turn("system", "billing\nYou help."),
        Turn("user", "task"),
        Turn("system", "a reminder"),
        Turn("assistant", "I go.", "think", calls, record=RECORD),
        Turn("tool", "bad input", call_id="call_b", name="Bash"),
        Turn("tool", "done", call_id="call_a", name="Bash"),
        Turn("user", "go on"),
    )
    assert [tool.name for tool in found.tools] == ["Bash"]
    assert (found.limit, found.dropped) == (32000, {})


def test_pi_and_smolagents_in_chat() -> None:
    pi = read("pi-chat")
    assert pi.turns == (
        Turn("system", "You help."),
        Turn("user", "task"),
        Turn("assistant", "", "think", (ToolCall("call_a", "bash", '{"command":"ls"}'),)),
        Turn("tool", "done", call_id="call_a", name="bash"),
    )
    assert (pi.limit, pi.usage, pi.stream) == (4096, True, True)
    smol = read("smolagents")
    assert (smol.stop, smol.choice) == (("Observation:", "Calling tools:", "</code>"), "required")
    assert smol.turns[-1] == Turn("assistant", "Calling tools: [..]")


def test_thinking_in_text_is_split_from_the_reply_it_belongs_to() -> None:
    assert read("pydantic-ai").turns[:3] == (
        Turn("system", "one\n\ntwo"),
        Turn("user", "t"),
        Turn("assistant", "I go.", "think", (ToolCall("call_a", "f", '{"a":1}'),)),
    )
    reply = {"role": "assistant", "content": "<think>a\nb</think>\n\n c "}
    assert ask("chat", messages=[reply]).turns == (Turn("assistant", " c ", "a\nb"),)
    assert ask("messages", messages=[reply]).turns == (Turn("assistant", " c ", "a\nb"),)
    assert ask("chat", messages=[{"role": "assistant", "content": "<think>open"}]).turns[0].text == "<think>open"


def test_litellm_asks_by_anthropics_names() -> None:
    found = read("litellm")
    assert (found.choice, found.parallel, found.temperature, found.stop) == ("required", False, 0.0, ("END",))
    assert found.turns[0] == Turn("system", "You help.")


@pytest.mark.parametrize("program", sorted(BODIES))
def test_moved_cache_marks_do_not_change_the_turns(program: str) -> None:
    dialect, body = BODIES[program]
    marked = json.loads(json.dumps(body).replace('"type": "text"', '"type": "text", "cache_control": {"type": "x"}'))
    assert DIALECTS[dialect].parse(marked, {}) == DIALECTS[dialect].parse(body, {})


# --- folding ------------------------------------------------------------------------------------------------------

PART = {"chat": "text", "responses": "input_text", "messages": "text"}


def of_user(dialect: str, content: Any) -> str:
    where = "input" if dialect == "responses" else "messages"
    return ask(dialect, **{where: [{"role": "user", "content": content}]}).turns[-1].text


@pytest.mark.parametrize("dialect", DIALECTS)
def test_one_block_equals_the_text_and_a_further_block_extends_it(dialect: str) -> None:
    def parts(*texts: str) -> list[dict[str, str]]:
        return [{"type": PART[dialect], "text": text} for text in texts]

    assert of_user(dialect, parts(" a ")) == of_user(dialect, " a ") == " a "
    assert of_user(dialect, parts(" a ", "b")) == " a \nb"
    assert of_user(dialect, parts("", "a", "")) == "a"
    assert of_user(dialect, None) == of_user(dialect, "") == of_user(dialect, []) == ""


@pytest.mark.parametrize(("dialect", "name"), [("responses", "instructions"), ("messages", "system")])
def test_instructions_lead_and_a_system_text_stays_where_it_is_sent(dialect: str, name: str) -> None:
    where = "input" if dialect == "responses" else "messages"
    turns = [{"role": "system", "content": "b"}, HI, {"role": "developer", "content": "c"}]
    assert ask(dialect, **{name: "a", where: turns}).turns == (
        Turn("system", "a\n\nb"),
        Turn("user", "hi"),
        Turn("system", "c"),
    )
    assert ask(dialect, **{name: ""}).turns == (Turn("user", "hi"),)


def test_two_replies_with_records_of_their_own_stay_two_turns() -> None:
    def thought(text: str, record: str) -> dict[str, Any]:
        return {"type": "reasoning", "summary": [{"type": "summary_text", "text": text}], "encrypted_content": record}

    said = {"role": "assistant", "content": "x"}
    found = ask("responses", input=[HI, thought("cut", "rec_1"), thought("again", "rec_2"), said]).turns
    assert found[1:] == (
        Turn("assistant", "", "cut", record="rec_1"),
        Turn("assistant", "x", "again", record="rec_2"),
    )
    foreign = ask("responses", input=[thought("a", "gAAAA"), said]).turns
    assert foreign == (Turn("assistant", "x", "a"),)


def test_opaque_fields_that_are_no_records_are_ignored() -> None:
    blocks = [
        {"type": "redacted_thinking", "data": RECORD},
        {"type": "thinking", "thinking": "t", "signature": "other"},
    ]
    found = ask("messages", messages=[HI, {"role": "assistant", "content": blocks}]).turns[-1]
    assert found == Turn("assistant", "", "t", record=RECORD)
    late = [{"role": "assistant", "content": "x"}, {"role": "assistant", "content": blocks[:1]}]
    assert ask("messages", messages=late).turns == (Turn("assistant", "x", record=RECORD),)


def test_absent_empty_and_null_text_beside_calls_are_equal() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    bare = {"role": "assistant", "tool_calls": [call]}
    found = {ask("chat", messages=[bare | more]).turns for more in ({}, {"content": None}, {"content": ""})}
    assert found == {(Turn("assistant", calls=(ToolCall("c", "f", "{}"),)),)}


def test_whole_reasoning_goes_before_its_summary() -> None:
    summary = [{"type": "summary_text", "text": "short"}]
    item = {"type": "reasoning", "summary": summary, "content": [{"type": "reasoning_text", "text": "long"}]}
    assert ask("responses", input=[item]).turns == (Turn("assistant", "", "long"),)


def test_a_message_of_results_alone_is_no_turn_of_the_user() -> None:
    result = {"type": "tool_result", "tool_use_id": "c", "content": None}
    assert ask("messages", messages=[{"role": "user", "content": [result]}]).turns == (Turn("tool", call_id="c"),)


def test_custom_tools_are_functions_of_one_text_there_and_back() -> None:
    tools = ({"type": "custom", "name": "patch", "description": "P."},)
    items = [
        HI,
        {"type": "custom_tool_call", "call_id": "c", "name": "patch", "input": "*** é"},
        {"type": "custom_tool_call_output", "call_id": "c", "output": "ok"},
    ]
    found = ask("responses", tools=list(tools), input=items, tool_choice={"type": "custom", "name": "patch"})
    call = ToolCall("c", "patch", '{"input":"*** é"}')
    assert found.turns[1:] == (Turn("assistant", calls=(call,)), Turn("tool", "ok", call_id="c", name="patch"))
    assert found.choice == "name:patch"
    assert found.tools[0].parameters["required"] == ["input"]
    made = answered(calls=(call, ToolCall("d", "patch", "no json")))
    inputs = [i["input"] for i in responses.answer(found, made)["output"] if i["type"] == "custom_tool_call"]
    assert inputs == ["*** é", "no json"]


# --- parameters ---------------------------------------------------------------------------------------------------

IGNORED = {
    "store": True, "include": ["x"], "reasoning": {"effort": "high"}, "reasoning_effort": "high", "user": "u",
    "thinking": {"type": "enabled", "budget_tokens": 1024}, "context_management": {}, "metadata": {"a": "b"},
    "client_metadata": {}, "prompt_cache_key": "k", "cache_control": {}, "service_tier": "auto", "betas": ["x"],
    "truncation": "auto", "verbosity": "low", "something_new": [1], "safety_identifier": "s", "top_p": 1.0,
    "top_k": -1, "min_p": 0, "presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}, "bad_words": [],
    "min_tokens": 0, "n": 1, "top_logprobs": 0, "repetition_penalty": 1.0, "background": None, "prediction": None,
}  # fmt: skip


@pytest.mark.parametrize("dialect", DIALECTS)
def test_what_has_no_effect_is_ignored_and_what_would_have_is_listed(dialect: str) -> None:
    assert ask(dialect, **IGNORED | ({} if dialect != "messages" else {"top_logprobs": 9})) == ask(dialect)
    shaped = {
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "presence_penalty": 1,
        "logit_bias": {"5": 3},
        "bad_words": ["x"],
        "min_tokens": 2,
        "ignore_eos": True,
    }
    assert set(ask(dialect, **shaped).dropped) == set(shaped)
    assert ask(dialect, seed=7).seed == 7
    assert ask(dialect, temperature=0.25).temperature == 0.25
    assert ask(dialect, temperature=1e-9).temperature == 0.0


REFUSED = [
    ("chat", {"n": 2}), ("chat", {"best_of": 2}), ("chat", {"response_format": {"type": "json_object"}}),
    ("chat", {"prediction": {"type": "content"}}), ("chat", {"modalities": ["audio"]}), ("chat", {"top_logprobs": 2}),
    ("chat", {"functions": [{"name": "f"}]}), ("chat", {"tool_choice": {"type": "allowed_tools"}}),
    ("chat", {"tools": [{"type": "custom", "custom": {"name": "f"}}]}), ("chat", {"guided_regex": "a+"}),
    ("chat", {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": PNG}}]}]}),
    ("chat", {"messages": [{"role": "function", "name": "f", "content": "x"}]}),
    ("responses", {"background": True}), ("responses", {"previous_response_id": "resp_1"}),
    ("responses", {"conversation": "c"}), ("responses", {"text": {"format": {"type": "json_schema"}}}),
    ("responses", {"input": [{"type": "item_reference", "id": "x"}]}), ("responses", {"prompt": {"id": "p"}}),
    ("responses", {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": PNG}]}]}),
    ("messages", {"output_config": {"format": {"type": "json_schema"}}}), ("messages", {"n": 2}),
    ("messages", {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}),
    ("messages", {"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]}),
]  # fmt: skip


@pytest.mark.parametrize(("dialect", "more"), REFUSED)
def test_what_cannot_be_honoured_is_refused_by_name(dialect: str, more: dict[str, Any]) -> None:
    error = refusal(dialect, **more)
    assert error.code == "unsupported"
    assert str(error).startswith(next(iter(more)))


INVALID = [
    ("chat", {"messages": []}, "the prompt is empty"), ("chat", {"messages": "hi"}, "messages: must be a list"),
    ("chat", {"messages": [7]}, "messages.0: must be an object, is a number"), ("chat", {"stream": "yes"}, "stream"),
    ("chat", {"max_tokens": 0}, "max_tokens: must be 1"), ("chat", {"temperature": -1}, "temperature"),
    ("chat", {"temperature": True}, "temperature"), ("chat", {"stop": [""]}, "stop"), ("chat", {"seed": -1}, "seed"),
    ("chat", {"stop": ["x"] * 17}, "stop"), ("chat", {"max_completion_tokens": 1.5}, "max_completion_tokens"),
    ("chat", {"tool_choice": "required"}, "tool_choice: a call is required"), ("chat", {"top_p": "high"}, "top_p"),
    ("chat", {"tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice: no tool"),
    ("chat", {"tools": [{"type": "function"}]}, "tools.0.function"), ("chat", {"model": 3}, "model"),
    ("chat", {"tools": [{"type": "function", "function": {"name": "f"}}] * 2}, "tools: two tools"),
    ("chat", {"messages": [HI] * (MAX_ITEMS + 1)}, "messages: has"), ("responses", {"input": None}, "the prompt"),
    ("responses", {"input": [{"type": "function_call_output", "output": "x"}]}, "input.0.call_id"),
    ("messages", {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "messages.0.content.0.tool"),
    ("messages", {"tools": [{"name": "f", "input_schema": []}]}, "tools.0.input_schema"),
    ("chat", {"metadata": {"a": float("nan")}}, "metadata: holds a number"), ("chat", {"user": "\ud800"}, "user"),
    ("chat", {"metadata": {"\udfff": 1}}, "metadata"), ("chat", {"temperature": 10**400}, "temperature"),
]  # fmt: skip


@pytest.mark.parametrize(("dialect", "more", "told"), INVALID)
def test_what_is_wrong_is_told_with_its_place(dialect: str, more: dict[str, Any], told: str) -> None:
    error = refusal(dialect, **more)
    assert str(error).startswith(told)
    assert error.code in ("invalid_request", "empty_prompt")


def test_a_refusal_quotes_little() -> None:
    assert len(str(refusal("chat", n="x" * 10_000))) < 200
    assert len(str(refusal("chat", **{"y" * 10_000: "\ud800"}))) < 200


@pytest.mark.parametrize("dialect", DIALECTS)
def test_deep_nesting_is_refused_wherever_it_is(dialect: str) -> None:
    deep: Any = "x"
    for _ in range(MAX_DEPTH + 1):
        deep = [{"a": deep}]
    assert "nested" in str(refusal(dialect, ignored=deep))
    assert "nested" in str(refusal(dialect, tools=deep))


@pytest.mark.parametrize(
    ("dialect", "given", "choice"),
    [
        ("chat", "none", "none"), ("chat", {"type": "function", "function": {"name": "bash"}}, "name:bash"),
        ("responses", "required", "required"), ("responses", {"type": "function", "name": "bash"}, "name:bash"),
        ("messages", {"type": "auto"}, "auto"), ("messages", {"type": "none"}, "none"),
        ("messages", {"type": "any"}, "required"), ("messages", {"type": "tool", "name": "bash"}, "name:bash"),
    ],
)  # fmt: skip
def test_tool_choice_in_each_dialects_words(dialect: str, given: Any, choice: str) -> None:
    tool = {"chat": {"type": "function", "function": {"name": "bash", "parameters": SHELL}},
            "responses": {"type": "function", "name": "bash", "parameters": SHELL},
            "messages": {"name": "bash", "input_schema": SHELL}}[dialect]  # fmt: skip
    found = ask(dialect, tools=[tool], tool_choice=given)
    assert found.choice == choice
    assert found.tools == (Tool("bash", "", SHELL),)


def test_usage_in_a_chat_stream_only_when_asked_for() -> None:
    assert ask("chat").usage
    assert not ask("chat", stream=True).usage
    assert ask("chat", stream=True, stream_options={"include_usage": True}).usage
    silent = said(chat.events(asked(usage=False), answered()))
    assert not any("usage" in chunk for chunk in silent)


# --- what programs get --------------------------------------------------------------------------------------------

KINDS: dict[str, Answer] = {
    "everything": answered(),
    "text": answered(text="é\u2028 𝔘 " * 40, **TEXT_ONLY),
    "empty": answered(text="", **TEXT_ONLY),
    "cut": answered(calls=(), finish="length"),
    "cut call": answered(calls=(ToolCall("call_x", "bash", '{"comm'),), finish="length"),
    "stopped": answered(stop="END", **TEXT_ONLY),
    "call alone": answered(text="", reasoning="", calls=(CALL,)),
    "no arguments": answered(calls=(ToolCall("call_y", "bash", ""), ToolCall("call_z", "bash", " "))),
}
WHOLE = sorted(set(KINDS) - {"cut call"})  # Anthropic's inputs are objects: of this call, stream and body differ
PATHS = {"/v1/chat/completions": chat, "/v1/responses": responses, "/v1/messages": messages}


def serve(made: Answer, seen: list[Asked] | None = None) -> Callable[[httpx2.Request], httpx2.Response]:
    """What the app does with the dialects, as a transport for the SDKs."""

    def handle(request: httpx2.Request) -> httpx2.Response:
        dialect = PATHS[request.url.path]
        wants = dialect.parse(json.loads(request.content), dict(request.headers))
        if seen is not None:
            seen.append(wants)
        if not wants.stream:
            return httpx2.Response(200, json=dialect.answer(wants, made))
        stream = [dialect.PING, dialect.opening(wants, made.record), dialect.PING, *dialect.events(wants, made)]
        return httpx2.Response(200, content=b"".join(stream), headers={"content-type": "text/event-stream"})

    return handle


def openai_of(made: Answer, seen: list[Asked] | None = None) -> openai.OpenAI:
    client = openai.DefaultHttpxClient(transport=httpx2.MockTransport(serve(made, seen)))
    return openai.OpenAI(api_key="k", base_url="http://space/v1", http_client=client, max_retries=0)


@pytest.fixture(params=KINDS)
def made(request: pytest.FixtureRequest) -> Answer:
    return KINDS[request.param]


CHAT_TOOL: Any = {"type": "function", "function": {"name": "bash", "parameters": SHELL}}
RESPONSES_TOOL: Any = {"type": "function", "name": "bash", "parameters": SHELL, "strict": False}


def test_openai_sdk_reads_chat_streamed_or_not_as_the_same(made: Answer) -> None:
    said: Any = [{"role": "user", "content": "hi"}]
    with openai_of(made) as client:
        whole = client.chat.completions.create(model="m", messages=said, tools=[CHAT_TOOL])
        state = openai.lib.streaming.chat.ChatCompletionStreamState(input_tools=[CHAT_TOOL])
        more: Any = {"stream_options": {"include_usage": True}}
        for chunk in client.chat.completions.create(model="m", messages=said, stream=True, **more):
            state.handle_chunk(chunk)
        streamed = state.current_completion_snapshot
    choice, copy = whole.choices[0], streamed.choices[0]
    assert (choice.message.content or "", choice.finish_reason) == (made.text, made.finish)
    assert (copy.message.content, copy.finish_reason) == (choice.message.content, choice.finish_reason)
    calls = [c.model_dump() for c in choice.message.tool_calls or []]
    assert [(c["id"], c["function"]["arguments"]) for c in calls] == [(c.id, c.arguments) for c in made.calls]
    got = [
        c.model_dump(exclude={"index": True, "function": {"parsed_arguments"}}) for c in copy.message.tool_calls or []
    ]
    assert got == calls
    assert getattr(choice.message, "reasoning_content", "") == made.reasoning
    assert getattr(copy.message, "reasoning_content", "") == made.reasoning
    assert whole.usage == streamed.usage
    assert whole.usage is not None
    assert whole.usage.prompt_tokens_details is not None
    assert (whole.usage.prompt_tokens_details.cached_tokens, whole.usage.total_tokens) == (16, 23)
    assert (whole.id, whole.created) == (streamed.id, streamed.created)
    assert whole.to_dict()["weight_version"] == streamed.to_dict()["weight_version"] == "v-1"


def test_openai_stream_helper_of_chat_ends_with_the_answer() -> None:
    with openai_of(KINDS["everything"]) as client:
        said: Any = [{"role": "user", "content": "hi"}]
        with client.chat.completions.stream(model="m", messages=said, tools=[CHAT_TOOL]) as stream:
            stream.until_done()
            message = stream.get_final_completion().choices[0].message
    assert message.content == " I look. "
    assert [c.id for c in message.tool_calls or []] == [CALL.id, SECOND.id]


def test_chat_tells_logprobs_when_asked() -> None:
    made = answered(pieces=("h", "é", "\u2028"))
    plain = chat.answer(asked(), made)
    assert plain["choices"][0]["logprobs"] is None
    found = chat.answer(asked(logprobs=True), made)["choices"][0]["logprobs"]["content"]
    assert [(e["token"], e["logprob"]) for e in found] == [("h", -0.5), ("é", -1.0), ("\u2028", -0.25)]
    assert found[1]["bytes"] == [195, 169]
    chunks = said(chat.events(asked(logprobs=True), made))
    streamed = [e for c in chunks for choice in c["choices"] for e in (choice["logprobs"] or {}).get("content", [])]
    assert streamed == found


def test_openai_sdk_reads_responses_streamed_or_not_as_the_same(made: Answer) -> None:
    with openai_of(made) as client:
        whole = client.responses.create(model="m", input="hi", tools=[RESPONSES_TOOL])
        with client.responses.create(model="m", input="hi", tools=[RESPONSES_TOOL], stream=True) as raw:
            kinds = list(raw)
        with client.responses.stream(model="m", input="hi", tools=[RESPONSES_TOOL]) as helper:
            helper.until_done()
            final = None if made.finish == "length" else helper.get_final_response()
    assert whole.output_text == made.text
    last = kinds[-1]
    assert last.type == ("response.incomplete" if made.finish == "length" else "response.completed")
    assert last.response == whole
    assert [event.sequence_number for event in kinds] == list(range(len(kinds)))
    calls = [item for item in whole.output if item.type == "function_call"]
    assert [(c.call_id, c.name, c.arguments) for c in calls] == [(c.id, c.name, c.arguments) for c in made.calls]
    thoughts = [item for item in whole.output if item.type == "reasoning"]
    assert [(t.summary[0].text, t.encrypted_content) for t in thoughts] == (
        [(made.reasoning, RECORD)] if made.reasoning else []
    )
    assert whole.usage is not None
    assert (whole.usage.input_tokens, whole.usage.input_tokens_details.cached_tokens) == (20, 16)
    if final is not None:
        assert final.output_text == whole.output_text
        assert [item.to_dict()["id"] for item in final.output] == [item.to_dict()["id"] for item in whole.output]


def test_the_last_item_of_an_answer_that_met_its_limit_is_incomplete() -> None:
    found = responses.answer(asked(), KINDS["cut call"])
    assert found["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [item.get("status") for item in found["output"]] == [None, "completed", "incomplete"]


def test_done_items_of_a_responses_stream_are_the_output() -> None:
    made = KINDS["everything"]
    events = said(responses.events(asked(), made))
    items = [e["item"] for e in events if e["type"] == "response.output_item.done"]
    assert items == responses.answer(asked(), made)["output"] == events[-1]["response"]["output"]
    deltas: dict[str, str] = {}
    for event in events:
        if event["type"].endswith(".delta"):
            deltas[event["item_id"]] = deltas.get(event["item_id"], "") + event["delta"]
    assert list(deltas.values()) == [made.reasoning, made.text, CALL.arguments, SECOND.arguments]


def test_a_call_of_a_namespace_is_answered_with_it() -> None:
    found = read("codex")
    made = answered(calls=(ToolCall("c", "spawn_agent", "{}"), ToolCall("d", "exec_command", "{}")))
    calls = [i for i in responses.answer(found, made)["output"] if i["type"] == "function_call"]
    assert [(c["name"], c.get("namespace")) for c in calls] == [("spawn_agent", "agents"), ("exec_command", None)]


@pytest.mark.parametrize("made", WHOLE, indirect=True)
def test_messages_stream_adds_up_to_the_answer(made: Answer) -> None:
    assert gathered(messages.events(asked(), made)) == messages.answer(asked(), made)


def test_messages_blocks_and_stop_reasons() -> None:
    found = messages.answer(asked(), KINDS["everything"])
    assert [b["type"] for b in found["content"]] == ["thinking", "text", "tool_use", "tool_use"]
    assert found["content"][0]["signature"] == RECORD
    assert found["content"][2]["input"] == {"command": "echo hé", "timeout": 10.0}
    reasons = {name: messages.answer(asked(), made)["stop_reason"] for name, made in KINDS.items()}
    assert reasons == {
        "everything": "tool_use", "text": "end_turn", "empty": "end_turn", "cut": "max_tokens",
        "cut call": "max_tokens", "stopped": "stop_sequence", "call alone": "tool_use", "no arguments": "tool_use",
    }  # fmt: skip
    assert messages.answer(asked(), KINDS["stopped"])["stop_sequence"] == "END"
    usage = found["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"], usage["output_tokens"]) == (4, 16, 3)


@pytest.mark.parametrize("arguments", ['{"a', "[1]", '{"a": NaN}', '{"a": 1e999}', '{"a": "\\ud800"}', "[" * 5000])
def test_arguments_that_are_no_object_are_a_text_or_sent_as_they_are(arguments: str) -> None:
    made = answered(text="", calls=(ToolCall("call_x", "bash", arguments),))
    found = messages.answer(asked(), made)
    assert found["content"][1] == {"type": "text", "text": f"bash({arguments})"}
    assert found["stop_reason"] == "end_turn"
    events = said(messages.events(asked(), made))
    assert "".join(e["delta"]["partial_json"] for e in events if e.get("delta", {}).get("partial_json")) == arguments
    assert events[-2]["delta"]["stop_reason"] == "tool_use"


def anthropic_of(made: Answer) -> Any:
    anthropic = pytest.importorskip("anthropic", reason="the anthropic SDK is not installed here")
    client = anthropic.DefaultHttpxClient(transport=httpx2.MockTransport(serve(made)))
    return anthropic.Anthropic(api_key="k", base_url="http://space", http_client=client, max_retries=0)


@pytest.mark.parametrize("made", WHOLE, indirect=True)
def test_anthropic_sdk_reads_messages_streamed_or_not_as_the_same(made: Answer) -> None:
    request: Any = {"model": "m", "max_tokens": 9, "messages": [HI], "tools": [{"name": "bash", "input_schema": SHELL}]}
    with anthropic_of(made) as client:
        whole = client.messages.create(**request)
        with client.messages.stream(**request) as stream:
            final = stream.get_final_message()
    assert final.to_dict() == whole.to_dict()
    assert "".join(b.text for b in whole.content if b.type == "text") == made.text
    assert [b.id for b in whole.content if b.type == "tool_use"] == [c.id for c in made.calls]


# --- there and back -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("redump", [False, True])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_an_answer_sent_back_is_the_same_turn(dialect: str, redump: bool, plain: bool) -> None:
    made = KINDS["everything"]
    where = "input" if dialect == "responses" else "messages"
    back = echoed(dialect, DIALECTS[dialect].answer(asked(), made), redump=redump, plain=plain)
    turn = ask(dialect, **{where: [HI, *back]}).turns[-1]
    assert (turn.text, turn.reasoning) == (made.text, made.reasoning)
    assert [(c.id, c.name) for c in turn.calls] == [(c.id, c.name) for c in made.calls]
    assert [json.loads(c.arguments) for c in turn.calls] == [json.loads(c.arguments) for c in made.calls]
    assert turn.record == ("" if dialect == "chat" else RECORD)
    if dialect != "messages" and not redump:
        assert turn.calls == made.calls


# --- errors -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dialect", [chat, responses])
def test_openai_errors(dialect: ModuleType) -> None:
    def told(status: int, code: str, message: str = "tools.0.name: bad") -> tuple[str, str | None, str]:
        error = dialect.error(status, code, message)["error"]
        assert error["message"] == message
        return error["type"], error["param"], error["code"]

    assert told(400, "invalid_request") == ("invalid_request_error", "tools.0.name", "invalid_request")
    assert told(401, "unauthorized", "no key") == ("authentication_error", None, "invalid_api_key")
    assert told(404, "model_not_found", "no: such") == ("invalid_request_error", "no", "model_not_found")
    assert told(400, "prompt_too_long", "9 > 5") == ("invalid_request_error", None, "context_length_exceeded")
    assert told(429, "overloaded", "wait") == ("rate_limit_error", None, "overloaded")
    assert told(503, "not_ready", "no weights") == ("server_error", None, "not_ready")


def test_anthropic_errors() -> None:
    def told(status: int, code: str = "x", message: str = "m") -> tuple[str, str]:
        body = messages.error(status, code, message)
        assert (body["type"], body["request_id"]) == ("error", None)
        return body["error"]["type"], body["error"]["message"]

    kinds = {status: told(status)[0] for status in (400, 401, 404, 429, 500, 503, 529)}
    assert kinds == {
        400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error",
        500: "api_error", 503: "overloaded_error", 529: "overloaded_error",
    }  # fmt: skip
    assert told(400, "prompt_too_long", "9 > 5") == ("invalid_request_error", "prompt is too long: 9 > 5")


def failing(stream: bytes) -> Callable[[httpx2.Request], httpx2.Response]:
    return lambda _: httpx2.Response(200, content=stream, headers={"content-type": "text/event-stream"})


def test_an_error_inside_a_stream_reaches_the_openai_sdk() -> None:
    begun = responses.opening(asked(), RECORD) + responses.PING
    for tail in (responses.error_event(503, "not_ready", "gone", RECORD), chat.error_event(503, "not_ready", "gone")):
        transport = httpx2.MockTransport(failing(begun + tail))
        http = openai.DefaultHttpxClient(transport=transport)
        with openai.OpenAI(api_key="k", base_url="http://space/v1", http_client=http, max_retries=0) as client:
            if b"response.failed" in tail:
                with client.responses.stream(model="m", input="hi") as stream:
                    last = list(stream)[-1]
                assert last.type == "response.failed"
                assert last.response.error is not None
                assert (last.response.error.code, last.response.error.message) == ("server_error", "gone")
            else:
                with pytest.raises(openai.APIError, match="gone"):
                    list(client.chat.completions.create(model="m", messages=[], stream=True))


def test_an_error_inside_a_stream_reaches_the_anthropic_sdk() -> None:
    anthropic = pytest.importorskip("anthropic", reason="the anthropic SDK is not installed here")
    tail = messages.PING + messages.error_event(529, "overloaded", "gone")
    http = anthropic.DefaultHttpxClient(transport=httpx2.MockTransport(failing(tail)))
    client = anthropic.Anthropic(api_key="k", base_url="http://space", http_client=http, max_retries=0)
    request: Any = {"model": "m", "max_tokens": 9, "messages": [HI]}
    with client, pytest.raises(anthropic.APIStatusError, match="gone"), client.messages.stream(**request) as stream:
        stream.get_final_message()
