"""Outputs as text, reasoning and calls: every format, arguments as sampled, and nothing lost where it is broken."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from support.templates import tokenizer_for

from inference_space.gateway.parsing import Parsed, Parser
from inference_space.gateway.turns import Tool, ToolCall, Turn
from inference_space.render import Prefix, conversation_text, opening_for, render_turns

pytestmark = pytest.mark.unit

TOOL = Tool(
    "search",
    "Searches.",
    {"type": "object", "properties": {"query": {"type": "string"}, "limit": {"type": "integer"}}},
)
ODD = '{ "query" : "h\\u00e9 </tool_call> }" ,"limit": 10.0}'


def parse(name: str, text: str, opening: str = "", tools: tuple[Tool, ...] = (TOOL,)) -> Parsed:
    return Parser(tokenizer_for(name)).parse(text, opening=opening, tools=tools)


def block(arguments: str, name: str = "search") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "chatml", "gemma3"])
def test_hermes(name: str) -> None:
    text = f"Let me look.\n{block(ODD)}\n{block('{}', 'unknown')}"
    assert parse(name, text) == Parsed("Let me look.", "", (("search", ODD), ("unknown", "{}")))


def test_arguments_may_come_before_the_name_and_be_missing() -> None:
    assert parse("qwen3", f'<tool_call>{{"arguments":{ODD},"name":"search"}}</tool_call>').calls == (("search", ODD),)
    assert parse("qwen3", '<tool_call>{"name":"search"}</tool_call>').calls == (("search", "{}"),)


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('<tool_call>\n{"name": "search", "arguments": {"query": "a</tool_call>', '{"query": "a'),
        ('<tool_call>\n{"name": "search", "arguments": {"query": "a\\', '{"query": "a\\'),
        ('<tool_call>\n{"name": "search", "arguments": {"query": [1, {"a"', '{"query": [1, {"a"'),
        ('<tool_call>\n{"name": "search", "arguments": {"query": "a"}', '{"query": "a"}'),
        ('<tool_call>\n{"name": "search", "arguments": {"query": "a"}\n</tool_call>', '{"query": "a"}'),
        ('<tool_call>\n{"name": "search", "arguments": "text"}</tool_call>', '"text"'),
        ('<tool_call>\n{"name": "search", "arguments": {query: a}}</tool_call>', "{query: a}"),
        ('<tool_call>\n{"name": "search", "argum', '"argum'),
        ('<tool_call>\n{"name": "search"', ""),
    ],
)
def test_broken_arguments_stay_as_they_are(text: str, arguments: str) -> None:
    assert parse("qwen3", text) == Parsed("", "", (("search", arguments),))


def test_a_broken_call_does_not_take_the_next_one_with_it() -> None:
    broken = '<tool_call>\n{"name": "search", "arguments": {"query": "a}\n</tool_call>\n'
    calls = parse("qwen3", broken + block(ODD)).calls
    assert calls == (("search", '{"query": "a}'), ("search", ODD))
    assert parse("qwen3", broken.replace("</tool_call>", "") + block(ODD)).calls == calls


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>\n{"na',
        '<tool_call>{"name": "sea',
        '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "", "arguments": {}}</tool_call>',
        "<tool_call>[]</tool_call>",
        "<tool_call></tool_call> and more",
        "no call at all  \n",
        "",
    ],
)
def test_what_names_no_tool_stays_text(text: str) -> None:
    assert parse("qwen3", text) == Parsed(text)


def test_a_nameless_block_beside_a_call_stays_text() -> None:
    assert parse("qwen3", f"<tool_call>{{}}</tool_call>{block(ODD)}b") == Parsed(
        "<tool_call>{}</tool_call>\nb", "", (("search", ODD),)
    )


def test_without_tools_there_are_no_calls() -> None:
    assert parse("qwen3", block(ODD), tools=()) == Parsed(block(ODD))


@pytest.mark.parametrize(
    ("name", "text", "reasoning", "rest"),
    [
        ("qwen3", "<think>\nHm. <tool_call>\n</think>\n\n Paris ", "Hm. <tool_call>", " Paris "),
        ("qwen3", "<think>\n\n</think>\n\nParis", "", "Paris"),
        ("qwen3", "Hm.\n</think>\n\nParis", "Hm.", "Paris"),
        ("qwen3", "<think>\nHm. " + block(ODD), "Hm. " + block(ODD), ""),
        ("qwen3", "I <think> so </think>", "", "I <think> so </think>"),
        ("qwen3_5_think", "Hm.\n</think>\n\nParis", "Hm.", "Paris"),
        ("qwen3_5_think", "Hm. It is", "Hm. It is", ""),
        ("qwen3_5_nothink", "Paris", "", "Paris"),
        ("chatml", "<think>Hm.</think>Paris", "Hm.", "Paris"),
        ("chatml", "Use </think> to stop.", "", "Use </think> to stop."),
    ],
)
def test_reasoning(name: str, text: str, reasoning: str, rest: str) -> None:
    assert parse(name, text) == Parsed(rest, reasoning)


def test_reasoning_text_and_a_call() -> None:
    text = f"<think>\nHm.\n</think>\n\nLet me look.\n{block(ODD)}"
    assert parse("qwen3", text) == Parsed("Let me look.", "Hm.", (("search", ODD),))


XML = "<tool_call>\n<function=search>\n<parameter=query>\n{}\n</parameter>\n<parameter=limit>\n{}\n</parameter>\n"
XML_END = "</function>\n</tool_call>"


def test_xml_parameters_are_typed_by_the_schema() -> None:
    code = 'if a < b:\n    print("</function>")\n'
    found = parse("qwen3_5_nothink", "Look:\n\n" + XML.format(code, 3) + XML_END)
    assert found.text == "Look:"
    assert [(name, json.loads(arguments)) for name, arguments in found.calls] == [
        ("search", {"query": code, "limit": 3})
    ]
    number = parse("qwen3_5_nothink", XML.format("75001", "many") + XML_END)
    assert json.loads(number.calls[0][1]) == {"query": "75001", "limit": "many"}


@pytest.mark.parametrize("end", [XML_END, "</function>", "</tool_call>"])
def test_xml_needs_not_every_closing_tag(end: str) -> None:
    for start in ("", "<tool_call>\n"):
        text = XML.format("a", 1).removeprefix("<tool_call>\n") + end
        assert parse("qwen3_5_nothink", start + text * 2).calls == (("search", '{"query": "a", "limit": 1}'),) * 2


@pytest.mark.parametrize("text", [XML.format("a", 1), XML.format("a", 1)[:-14], "<function=search>\n<parameter=que"])
def test_xml_that_is_cut_stays_as_it_is(text: str) -> None:
    ((name, arguments),) = parse("qwen3_5_nothink", text).calls
    assert name == "search"
    assert arguments == text.partition("<function=search>\n")[2].rstrip("\n")


def test_xml_without_a_readable_name_stays_text() -> None:
    for text in ("<tool_call>\n<function=sea", "<function=>x</function>", "<function=a\nb>"):
        assert parse("qwen3_5_nothink", text) == Parsed(text)


@pytest.mark.parametrize(
    "text",
    [
        f'[TOOL_CALLS] [{{"name": "search", "arguments": {ODD}, "id": "a"}}, {{"name": "x", "arguments": {{}}}}]',
        f'[TOOL_CALLS][{{"name": "search", "arguments": {ODD}}}, {{"name": "x", "arguments": {{}}}}',
        f"[TOOL_CALLS]search{ODD}[TOOL_CALLS]x{{}}",
        f"[TOOL_CALLS]search[ARGS]{ODD}[TOOL_CALLS]x[CALL_ID]abcdefghi[ARGS]{{}}",
    ],
)
def test_mistral(text: str) -> None:
    assert parse("mistral", " Hm. " + text) == Parsed(" Hm. ", "", (("search", ODD), ("x", "{}")))


def test_mistral_cut() -> None:
    assert parse("mistral", '[TOOL_CALLS] [{"name": "search", "arguments": {"a').calls == (("search", '{"a'),)
    assert parse("mistral", '[TOOL_CALLS]search[ARGS]{"a').calls == (("search", '{"a'),)
    assert parse("mistral", "[TOOL_CALLS] sea") == Parsed("[TOOL_CALLS] sea")


def test_llama() -> None:
    call = f'{{"name": "search", "parameters": {ODD}}}'
    for text in (call, "<|python_tag|>" + call, "\n" + call):
        assert parse("llama3_1", text) == Parsed("", "", (("search", ODD),))
    assert parse("llama3_1", f"{call}; {call}").calls == (("search", ODD),) * 2
    assert parse("llama3_1", call[:-4]).calls == (("search", ODD[:-3]),)
    for text in ('{"name": "Bob", "age": 7}', f"So: {call}", '<|python_tag|>search.call(query="a")', '{"name": "sea'):
        assert parse("llama3_1", text) == Parsed(text)


# --- response templates


def with_responses(name: str, template: dict[str, Any]) -> Parser:
    tokenizer = copy.deepcopy(tokenizer_for(name))
    tokenizer.response_template = template
    return Parser(tokenizer)


CHANNELS: dict[str, Any] = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "thinking": {"open": "<|thought|>", "close": "<|/thought|>", "content": "text"},
        "tool_calls": {
            "open_pattern": r"<\|call\|>(?P<name>\w+)",
            "close": "<|/call|>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"close_pattern": r"<\|im_end\|>\s*", "content": "text"},
    },
}


def test_a_response_template_comes_first_and_leaves_arguments_as_they_are() -> None:
    parser = with_responses("chatml", CHANNELS)
    text = f"<|thought|>Hm.<|/thought|>Look.<|call|>search{ODD}<|/call|>Then.<|call|>x{{}}<|/call|>"
    assert parser.parse(text, tools=(TOOL,)) == Parsed("Look.\nThen.", "Hm.", (("search", ODD), ("x", "{}")))
    assert parser.parse('<|call|>search{"query": "a', tools=(TOOL,)).calls == (("search", '{"query": "a'),)
    assert parser.parse(f"search{ODD}<|/call|>", opening="<|call|>", tools=(TOOL,)).calls == (("search", ODD),)


def test_whole_calls_of_a_response_template_are_read_as_they_are() -> None:
    whole = copy.deepcopy(CHANNELS)
    whole["fields"]["tool_calls"] |= {
        "open": "<|call|>", "transform": {"type": "function", "function": "{content}"}
    }  # fmt: skip
    del whole["fields"]["tool_calls"]["open_pattern"]
    call = f'<|call|>{{"name": "search", "arguments": {ODD}}}<|/call|>'
    assert with_responses("chatml", whole).parse(call, tools=(TOOL,)).calls == (("search", ODD),)


def test_a_response_template_that_is_no_use_is_passed_over() -> None:
    for template in ({}, {"fields": {"content": {"content": "nonsense"}}}, {"fields": {"content": 3}}):
        assert with_responses("chatml", template).parse(block(ODD), tools=(TOOL,)).calls == (("search", ODD),)


@pytest.mark.timeout(60)  # the pattern needs ages for this text
def test_a_response_template_that_may_never_end_is_passed_over() -> None:
    for pattern in (r"(?:a+)+(?P<name>!)", r"(?=[\s\S]*?!)(?P<name>a)"):
        slow = copy.deepcopy(CHANNELS)
        slow["fields"]["tool_calls"]["open_pattern"] = pattern
        assert with_responses("chatml", slow).parse("a" * 16_000 + block(ODD), tools=(TOOL,)).calls == (
            ("search", ODD),
        )


# --- together with rendering


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "qwen3_5_think", "qwen3_5_nothink", "llama3_1", "mistral"])
def test_what_a_template_writes_is_read_back(name: str) -> None:
    arguments = {"query": 'a "b" \\ {c}\né', "limit": 2}
    call = ToolCall("abcdefghi", "search", json.dumps(arguments))
    turns = [Turn("user", "x"), Turn("assistant", "", calls=(call,)), Turn("tool", "y", call_id=call.id)]
    tokenizer = tokenizer_for(name)
    prompt = conversation_text(tokenizer, turns[:1], [TOOL])
    sampled = conversation_text(tokenizer, turns, [TOOL])[len(prompt) :]
    end = {"mistral": "</s>", "llama3_1": "<|eot_id|>"}.get(name, "<|im_end|>")
    found = parse(name, sampled[: sampled.index(end)])
    assert [(made, json.loads(text)) for made, text in found.calls] == [("search", arguments)]
    assert found.text.strip() == ""


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5_think", "llama3_1", "mistral"])
def test_a_forced_call_is_read_whatever_follows(name: str) -> None:
    tokenizer = tokenizer_for(name)
    opening = opening_for(tokenizer, "name:search")
    assert opening is not None
    for rest in ("", "nonsense", ' {"query": "a"}', "<parameter=query>\na\n</parameter>\n</function>\n</tool_call>"):
        (call,) = parse(name, rest, opening).calls
        assert call[0] == "search"
    required = opening_for(tokenizer, "required")
    assert required is not None
    (call,) = parse(name, 'other", "arguments": {}' if "<func" not in required else "other>\n", required).calls
    assert call[0] == "other"


def test_a_parsed_answer_is_what_the_next_prompt_needs() -> None:
    tokenizer = tokenizer_for("qwen3")
    ask = Turn("user", "x")
    sampled = f"<think>\nHm.\n</think>\n\n{block(ODD)}"
    ids = (*render_turns(tokenizer, [ask], [TOOL]), *tokenizer.encode(sampled + "<|im_end|>"))
    found = parse("qwen3", sampled)
    said = Turn("assistant", found.text, found.reasoning, tuple(ToolCall("c", *call) for call in found.calls))
    longer = render_turns(tokenizer, [Turn("tool", "y", call_id="c")], [TOOL], prefix=Prefix(ids, said, (ask,)))
    assert tokenizer.decode(longer[len(ids) :]).startswith("\n<|im_start|>user\n<tool_response>\ny\n")


@pytest.mark.timeout(60)  # a quadratic reader needs many minutes
@pytest.mark.parametrize("name", ["qwen3", "qwen3_5_nothink", "mistral", "llama3_1"])
@pytest.mark.parametrize(
    "unit",
    [
        "<tool_call>", '<tool_call>{"', '<tool_call>{"\\"', "<tool_call>{</tool_call>", "<function=a></tool_call>",
        "<function=a><parameter=b>", "[TOOL_CALLS] [{", "[TOOL_CALLS]a{", '{"name": "a", "parameters": {', "[", " ",
    ],
)  # fmt: skip
def test_a_megabyte_of_hostile_text_is_read_in_linear_time(name: str, unit: str) -> None:
    text = unit * (2**20 // len(unit))
    found = parse(name, text)
    assert found.calls or found.text == text
