"""The parser over any text: total, losing nothing, and exact about arguments."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.templates import tokenizer_for

from inference_space.gateway.parsing import Parsed, Parser
from inference_space.gateway.turns import Tool

pytestmark = pytest.mark.property

TOOL = Tool("search", "", {"type": "object", "properties": {"query": {"type": "string"}}})
NAMES = ["qwen2_5", "qwen3", "qwen3_5_think", "qwen3_5_nothink", "mistral", "llama3_1", "chatml"]
PIECES = [
    "<tool_call>", "</tool_call>", "<think>", "</think>", "<function=search>", "</function>", "<parameter=query>",
    "</parameter>", "[TOOL_CALLS]", "[ARGS]", "[{", "}]", '{"name": "search", "arguments": ', '{"name": "search"',
    '"parameters": {', "<|python_tag|>", "{", "}", "[", "]", '"', "\\", ",", ":", "\n", " ", "a", "é", "10.0",
]  # fmt: skip
TEXT = st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=5)), max_size=25).map("".join)
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=8),
              st.sampled_from(["</tool_call>", "<tool_call>", "}", '"', "\\"])),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=8,
)  # fmt: skip
OBJECT = st.dictionaries(st.text(max_size=6), JSON, max_size=4)
SPACING = st.sampled_from([(",", ":"), (", ", ": "), (" ,", " :\t"), (",\n ", ":\n")])


def read(name: str, text: str, *, tools: tuple[Tool, ...] = (TOOL,)) -> Parsed:
    return Parser(tokenizer_for(name)).parse(text, tools=tools)


@given(name=st.sampled_from(NAMES), text=TEXT)
def test_any_text_is_an_answer_and_no_words_are_made_up(name: str, text: str) -> None:
    found = read(name, text)
    assert all(called for called, _ in found.calls)
    assert found.reasoning in text
    for part in found.text.split("\n"):
        assert part in text
    if not found.calls:
        assert found.text in text
        assert read(name, text, tools=()) == found


@given(name=st.sampled_from(["qwen2_5", "qwen3", "chatml"]), values=st.lists(OBJECT, min_size=1, max_size=3),
       spacing=SPACING, ascii_only=st.booleans(), gap=st.sampled_from(["", "\n", " "]))  # fmt: skip
def test_arguments_are_verbatim(name: str, values: list[dict[str, object]], spacing: tuple[str, str],
                                ascii_only: bool, gap: str) -> None:  # fmt: skip
    told = [json.dumps(value, separators=spacing, ensure_ascii=ascii_only) for value in values]
    text = "\n".join(f'<tool_call>{gap}{{"name": "f", "arguments": {t}}}{gap}</tool_call>' for t in told)
    assert read(name, "So.\n" + text) == Parsed("So.", "", tuple(("f", t) for t in told))


@given(value=OBJECT, cut=st.integers(min_value=0, max_value=200))
def test_a_cut_call_keeps_what_there_is(value: dict[str, object], cut: int) -> None:
    told = json.dumps(value)
    rest = told[: min(cut, len(told))]
    found = read("qwen3", '<tool_call>\n{"name": "f", "arguments": ' + rest)
    if "<tool_call>" not in rest and "</tool_call>" not in rest:
        assert [(name, text.strip()) for name, text in found.calls] == [("f", rest.strip())]
    assert found.calls[0][0] == "f"
