"""Which recorded answer an agent's turn is: what real programs change when they send it back, and what they may not."""

from __future__ import annotations

import pytest

from inference_space.gateway.linking import Linked, Tree, same_meaning
from inference_space.gateway.turns import Asked, Tool, ToolCall, Turn

pytestmark = pytest.mark.unit
SYSTEM, TASK = Turn("system", "You are useful."), Turn("user", "Do it.")
ODD = '{ "command" : "echo h\\u00e9" ,"timeout" : 10.0 }'
BASH = Tool("bash", "Run a command.", {"type": "object"})


def said(arguments: str = ODD, text: str = " I look. ", reasoning: str = "hm") -> Turn:
    return Turn("assistant", text, reasoning, (ToolCall("call_1", "bash", arguments),), record="rec_1")


def asked(*turns: Turn, tools: tuple[Tool, ...] = (BASH,)) -> Asked:
    return Asked("policy", (SYSTEM, TASK, *turns), tools)


def recorded(tree: Tree, request: Asked, answer: Turn, name: str) -> Linked:
    place = tree.find(request)
    call = Linked(name, place.turns, (1, 2, 3), answer)
    tree.add(place, call)
    return call


@pytest.mark.parametrize(
    ("arguments", "text", "reasoning"),
    [
        (ODD, " I look. ", "hm"),
        ('{"command":"echo hé","timeout":10}', "I look.", ""),
        ('{"timeout": 10.0, "command": "echo h\\u00e9"}', "I look. ", " hm\n"),
        (ODD, " I look. ", "thought that broke off\n\nhm"),
    ],
)
def test_an_echo_of_the_same_value_is_the_answer(arguments: str, text: str, reasoning: str) -> None:
    assert same_meaning(said(), said(arguments, text, reasoning))


@pytest.mark.parametrize(
    "echo",
    [
        said('{"command": "echo he", "timeout": 10}'),
        said('{"command": "echo hé", "timeout": true}'),
        said('{"command": "echo hé"}'),
        said('{"command": "echo hé", "timeout": 10}x'),
        said(text="I looked."),
        said(reasoning="other"),
        Turn("assistant", "I look.", "hm"),
        Turn("assistant", " I look. ", "hm", (ToolCall("call_1", "invalid", ODD),)),
        Turn("assistant", " I look. ", "hm", (ToolCall("call_1", "bash", ODD), ToolCall("call_2", "bash", ODD))),
    ],
)
def test_an_echo_that_says_something_else_is_not(echo: Turn) -> None:
    assert not same_meaning(said(), echo)


@pytest.mark.parametrize("broken", ['{"command": "ec', "{'a': 1}", "NaN", "[" * 5_000, '{"a": 1e999}'])
def test_arguments_that_are_no_json_must_come_back_as_they_were(broken: str) -> None:
    assert same_meaning(said(broken), said(broken))
    assert not same_meaning(said(broken), said("{}"))
    assert not same_meaning(said("{}"), said(broken))


def test_numbers_are_compared_as_javascript_keeps_them() -> None:
    assert same_meaning(said('{"n": 12345678901234567890}'), said('{"n": 12345678901234567000}'))
    assert not same_meaning(said('{"n": 1}'), said('{"n": true}'))
    assert not same_meaning(said('{"n": 0}'), said('{"n": false}'))
    assert not same_meaning(said('{"n": null}'), said("{}"))


def test_a_conversation_that_goes_on_finds_its_last_answer() -> None:
    tree = Tree()
    first = recorded(tree, asked(), said(), "rec_1")
    result = Turn("tool", "hé", call_id="call_1")
    second = recorded(
        tree, asked(said('{"timeout":10,"command":"echo hé"}'), result), Turn("assistant", "Done."), "rec_2"
    )
    place = tree.find(asked(said(), result, Turn("assistant", "Done. "), Turn("user", "More.")))
    assert place.parent is second
    assert place.rest == (Turn("user", "More."),)
    assert place.why == ""
    assert place.turns == (SYSTEM, TASK, first.said, result, second.said, Turn("user", "More."))


def test_an_edited_answer_forks_behind_the_one_before() -> None:
    tree = Tree()
    first = recorded(tree, asked(), said(), "rec_1")
    result = Turn("tool", "hé", call_id="call_1")
    recorded(tree, asked(said(), result), Turn("assistant", "Done."), "rec_2")
    place = tree.find(asked(said(), result, Turn("assistant", "Edited."), Turn("user", "More.")))
    assert place.parent is first
    assert place.why == "echo_differs"
    assert place.rest == (result, Turn("assistant", "Edited."), Turn("user", "More."))


@pytest.mark.parametrize(
    ("request_", "why"),
    [
        (asked(tools=()), "other_tools"),
        (asked(Turn("assistant", "Never said."), Turn("user", "?")), "echo_differs"),
        (Asked("policy", (Turn("system", "Another."), TASK), (BASH,)), "history_differs"),
        (asked(), "repeated"),
    ],
)
def test_what_makes_a_request_another_conversation_is_named(request_: Asked, why: str) -> None:
    tree = Tree()
    recorded(tree, asked(), said(), "rec_1")
    place = tree.find(request_)
    assert place.parent is None
    assert place.why == why


def test_a_second_way_on_from_one_answer_is_a_branch() -> None:
    tree = Tree()
    first = recorded(tree, asked(), said(), "rec_1")
    recorded(tree, asked(said(), Turn("user", "one")), Turn("assistant", "1"), "rec_2")
    place = tree.find(asked(said(), Turn("user", "two")))
    assert (place.parent, place.why) == (first, "branch")


def test_of_equal_answers_the_ids_decide_then_the_newest() -> None:
    tree = Tree()
    calls = []
    for number in (1, 2, 3):
        answer = Turn("assistant", "same", calls=(ToolCall(f"call_{number}", "bash", ODD),))
        calls.append(recorded(tree, asked(), answer, f"rec_{number}"))
    echo = Turn("assistant", "same", calls=(ToolCall("call_2", "bash", ODD),))
    assert tree.find(asked(echo)).parent is calls[1]
    bare = Turn("assistant", "same", calls=(ToolCall("other", "bash", ODD),), record="rec_1")
    assert tree.find(asked(bare)).parent is calls[0]
    unnamed = Turn("assistant", "same", calls=(ToolCall("other", "bash", ODD),))
    assert tree.find(asked(unnamed)).parent is calls[2]


def test_looking_changes_nothing() -> None:
    tree = Tree()
    recorded(tree, asked(), said(), "rec_1")
    before = tree.find(asked(said(), TASK))
    for _ in range(3):
        assert tree.find(asked(said(), TASK)) == before


def test_a_part_of_an_answer_names_the_call_that_was_cut() -> None:
    tree = Tree()
    cut = recorded(tree, asked(), said(), "rec_1")
    whole = recorded(tree, asked(), Turn("assistant", "Again.", record="rec_2"), "rec_2")
    part = Turn("assistant", "I look.", "hm", record="rec_1")
    place = tree.find(asked(part, whole.said, TASK))
    assert (place.parent, place.why, place.cut) == (None, "cut_answer", cut)
    for other in (Turn("assistant", "I looked", record="rec_1"), Turn("assistant", "I look."), said("{}")):
        place = tree.find(asked(other, TASK))
        assert (place.why, place.cut) == ("echo_differs", None)
