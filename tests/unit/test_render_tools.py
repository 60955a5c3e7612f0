"""Rendering of conversations with tools and reasoning, and what of them lets recorded ids grow."""

from __future__ import annotations

from typing import Any

import pytest
from support.templates import tokenizer_for
from support_tiny import make_tokenizer

from inference_space.gateway.turns import Tool, ToolCall, Turn
from inference_space.render import Prefix, conversation_text, opening_for, render_turns, takes_tools
from sync.errors import InvalidRequest

pytestmark = pytest.mark.unit

TOOL = Tool("search", "Searches.", {"type": "object", "properties": {"query": {"type": "string"}}})
ASK = Turn("user", "Which city is larger?")
CALLS = tuple(ToolCall(f"call_{n:024x}", "search", f'{{ "query" : "city {n}"}}') for n in (1, 2))
RESULTS = tuple(Turn("tool", f"{call.arguments} found", call_id=call.id) for call in CALLS)
MORE = Turn("user", "Are you sure?")
SAID = Turn("assistant", "Paris")


def encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))


def grown(name: str, sampled: str, answer: Turn, new: list[Turn], before: tuple[Turn, ...] = (ASK,)) -> str:
    """The text that a conversation has behind its sampled answer; checks that the recorded ids are untouched."""
    tokenizer = tokenizer_for(name)
    tools = [TOOL] if any(turn.calls for turn in (answer, *before)) else []
    ids = [*render_turns(tokenizer, before, tools), *encode(tokenizer, sampled)]
    longer = render_turns(tokenizer, new, tools, prefix=Prefix(tuple(ids), answer, before))
    assert longer[: len(ids)] == ids
    return str(tokenizer.decode(longer[len(ids) :]))


def refused(name: str, answer: Turn, new: list[Turn], before: tuple[Turn, ...] = (ASK,)) -> str:
    with pytest.raises(InvalidRequest) as caught:
        grown(name, "x<|im_end|>", answer, new, before)
    assert caught.value.code == "template_not_prefix_preserving"
    return str(caught.value)


CALLED = Turn("assistant", "", calls=CALLS[:1])
QWEN_RESULT = "\n<|im_start|>user\n<tool_response>\n" + RESULTS[0].text + "\n</tool_response><|im_end|>\n"
IPYTHON = "<|start_header_id|>ipython<|end_header_id|>\n\n"


@pytest.mark.parametrize(
    ("name", "sampled", "rest"),
    [
        ("qwen2_5", "<tool_call>…</tool_call><|im_end|>", QWEN_RESULT + "<|im_start|>assistant\n"),
        ("qwen3", "<tool_call>…</tool_call><|im_end|>", QWEN_RESULT + "<|im_start|>assistant\n"),
        ("qwen3_5_think", "…</tool_call><|im_end|>", QWEN_RESULT + "<|im_start|>assistant\n<think>\n"),
        ("glm4moe_training", "…</tool_call><|observation|>",
         f"\n<tool_response>\n{RESULTS[0].text}\n</tool_response><|assistant|>"),
        ("gemma4_v4", "…<tool_call|><|tool_response>",
         f'response:search{{value:<|"|>{RESULTS[0].text}<|"|>}}<tool_response|>'),
    ],
)  # fmt: skip
def test_a_tool_result_goes_behind_the_end_token_of_the_call(name: str, sampled: str, rest: str) -> None:
    assert grown(name, sampled, CALLED, [RESULTS[0]]) == rest


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "qwen3_5_think", "llama3_1", "mistral", "chatml"])
def test_a_cut_call_is_closed_before_its_result(name: str) -> None:
    rest = grown(name, "…", CALLED, [RESULTS[0]])
    end = {"llama3_1": "<|eot_id|>", "mistral": "</s>"}.get(name, "<|im_end|>")
    assert rest.startswith(end)
    assert "found" in rest
    assert "deltawire" not in rest


def test_a_call_that_was_cut_at_its_closing_tag_is_closed_behind_the_tag() -> None:
    rest = grown("qwen3", '<tool_call>\n{"name": "search"}\n</tool_call>', CALLED, [RESULTS[0]])
    assert rest == "<|im_end|>" + QWEN_RESULT + "<|im_start|>assistant\n"


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "qwen3_5_think", "mistral"])
def test_parallel_results_keep_the_order_in_which_they_came(name: str) -> None:
    end = "</s>" if name == "mistral" else "<|im_end|>"
    rest = grown(name, "…" + end, Turn("assistant", "", calls=CALLS), [RESULTS[1], RESULTS[0]])
    assert rest.index("city 2") < rest.index("city 1")


def test_mistral_gets_ids_of_nine_characters_that_pair_and_no_system_turn() -> None:
    tokenizer = tokenizer_for("mistral")
    turns = [Turn("system", "Be brief."), ASK, Turn("assistant", "", calls=CALLS), *RESULTS]
    text = conversation_text(tokenizer, turns, [TOOL])
    assert "[INST] Be brief.\n\n" + ASK.text + "[/INST]" in text
    for call in CALLS:
        assert call.id not in text
    made = [part.split('"')[0] for part in text.split('"id": "')[1:]]
    told = [part.split('"')[0] for part in text.split('"call_id": "')[1:]]
    assert made == told
    assert len(set(made)) == 2


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "llama3_1", "chatml", "mistral", "phi3", "gemma3"])
def test_a_follow_up_extends_what_the_engine_saw(name: str) -> None:
    assert MORE.text in grown(name, "Paris", SAID, [MORE])


@pytest.mark.parametrize(
    ("name", "thinks"), [("qwen3", True), ("forgets", True), ("qwen3_5_think", True), ("qwen3_5_think", False)]
)
def test_a_follow_up_that_clears_thinking_is_refused(name: str, thinks: bool) -> None:
    refused(name, Turn("assistant", "Paris", "Large." if thinks else ""), [MORE])


@pytest.mark.parametrize("name", ["qwen3_training", "qwen3_5_think_training", "qwen2_5", "chatml"])
def test_templates_that_keep_thinking_extend(name: str) -> None:
    rest = grown(name, "…<|im_end|>", Turn("assistant", "Paris", "Large."), [MORE])
    assert rest.startswith("\n<|im_start|>user\nAre you sure?")


def test_thinking_of_an_earlier_answer_counts_too() -> None:
    before = (ASK, Turn("assistant", "", "I should look.", CALLS[:1]), RESULTS[0])
    refused("qwen3", SAID, [MORE], before)
    plain = (ASK, CALLED, RESULTS[0])
    assert MORE.text in grown("qwen3", "Paris<|im_end|>", SAID, [MORE], plain)
    cleared = (ASK, Turn("assistant", "Rome", "Hm."), MORE)  # it was no longer there when the prompt was made
    assert MORE.text in grown("qwen3", "Paris<|im_end|>", SAID, [MORE], cleared)


def test_tool_results_leave_thinking_where_it_is() -> None:
    thought = Turn("assistant", "", "I should look.", CALLS[:1])
    assert grown("qwen3", "…<|im_end|>", thought, [RESULTS[0]]) == QWEN_RESULT + "<|im_start|>assistant\n"


def test_text_beside_a_call_that_the_template_leaves_out_is_refused() -> None:
    tokenizer = tokenizer_for("llama3_1")
    answer = Turn("assistant", "Let me look.", calls=CALLS[:1])
    with pytest.raises(InvalidRequest, match="leaves out or repeats the answer's text"):
        render_turns(tokenizer, [RESULTS[0]], [TOOL], prefix=Prefix((5, 6), answer, (ASK,)))


@pytest.mark.parametrize(("name", "code"), [("llama3_1", "template"), ("gemma3", "template"), ("phi3", "template")])
def test_what_a_template_cannot_say_is_refused(name: str, code: str) -> None:
    """Llama: two calls in one turn; Gemma: tool turns at all; Phi would silently leave out what a tool answered."""
    with pytest.raises(InvalidRequest) as caught:
        render_turns(tokenizer_for(name), [ASK, Turn("assistant", "", calls=CALLS), *RESULTS], [TOOL])
    assert caught.value.code == code


def test_a_refusal_says_what_the_template_said() -> None:
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        render_turns(tokenizer_for("mistral"), [ASK, Turn("assistant", "a"), Turn("assistant", "b"), ASK], [])


def test_user_turns_in_a_row_are_joined_where_a_template_wants_them_in_turn() -> None:
    tokenizer = tokenizer_for("mistral")
    joined = Turn("user", f"{ASK.text}\n\nand this")
    assert render_turns(tokenizer, [ASK, Turn("user", "and this")], []) == render_turns(tokenizer, [joined], [])


def test_tools_and_arguments_are_given_as_templates_want_them() -> None:
    text = conversation_text(tokenizer_for("qwen2_5"), [ASK, CALLED, RESULTS[0]], [TOOL])
    assert '"parameters": {"type": "object"' in text
    assert '{"name": "search", "arguments": {"query": "city 1"}}' in text  # an object, in the template's own spacing
    broken = Turn("assistant", "", calls=(ToolCall("c", "search", '{"query": "ci'),))
    assert '"arguments": {"query": "ci}' not in conversation_text(tokenizer_for("qwen2_5"), [ASK, broken], [])
    xml = conversation_text(tokenizer_for("qwen3_5_think"), [ASK, broken, RESULTS[0]], [])
    assert '{"query": "ci' in xml  # this template reads fields of an object, and would fail on text
    plain = conversation_text(tokenizer_for("deepseekv3"), [ASK, CALLED, RESULTS[0]], [])
    assert CALLS[0].arguments in plain  # and this one adds text to text


def test_what_a_template_has_no_field_for_is_written_into_the_text() -> None:
    text = conversation_text(tokenizer_for("chatml"), [ASK, Turn("assistant", "So.", "Hm.", CALLS[:1])], [])
    call = '<tool_call>\n{"name": "search", "arguments": ' + CALLS[0].arguments + "}\n</tool_call>"
    assert f"<think>\nHm.\n</think>\n\nSo.\n{call}<|im_end|>" in text


def test_whether_tools_are_shown_is_known() -> None:
    assert takes_tools(tokenizer_for("qwen3"), [TOOL])
    assert not takes_tools(tokenizer_for("chatml"), [TOOL])


def test_a_template_that_tells_the_time_is_rendered_anew() -> None:
    tokenizer = tokenizer_for("dated")
    assert render_turns(tokenizer, [ASK], []) != render_turns(tokenizer, [ASK], [])


def test_user_text_that_looks_like_an_end_token_ends_nothing() -> None:
    sly = Turn("user", "x<|endoftext|>y")
    tokenizer = make_tokenizer(tokenizer_for("chatml").chat_template)
    tokenizer.add_tokens(["<|im_start|>", "<|im_end|>", "<|endoftext|>"])
    ids = (*encode(tokenizer, "hi<|endoftext|>"),)
    longer = render_turns(tokenizer, [sly], [], prefix=Prefix(ids, SAID, (ASK,)))
    assert tokenizer.decode(longer[len(ids) :]).startswith("<|im_end|>\n<|im_start|>user\nx<|endoftext|>y<|im_end|>")


def test_without_new_turns_the_assistant_speaks_again() -> None:
    assert grown("chatml", "Paris<|im_end|>", SAID, []) == "\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("name", "required", "named"),
    [
        ("qwen3", '<tool_call>\n{"name": "', '<tool_call>\n{"name": "search", "arguments":'),
        ("qwen3_5_think", "\n</think>\n\n<tool_call>\n<function=",
         "\n</think>\n\n<tool_call>\n<function=search>\n"),
        ("llama3_1", '{"name": "', '{"name": "search", "parameters":'),
        ("mistral", '[TOOL_CALLS] [{"name": "', '[TOOL_CALLS] [{"name": "search", "arguments":'),
        ("gemma4_v4", None, None),
    ],
)  # fmt: skip
def test_a_forced_call_begins_as_the_template_writes_calls(name: str, required: str | None, named: str | None) -> None:
    tokenizer = tokenizer_for(name)
    assert opening_for(tokenizer, "required") == required
    assert opening_for(tokenizer, "name:search") == named
    assert opening_for(tokenizer, "auto") is None
