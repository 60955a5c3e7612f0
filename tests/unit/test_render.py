"""Rendering: the template's own ids at first, then only what belongs behind the recorded ids."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support_tiny import TEMPLATE, make_tokenizer

from inference_space.render import render
from sync.errors import InvalidRequest
from sync.schema.calls import Message

USER = Message(role="user", content="Guess a number between 1 and 99.")
HIGHER = Message(role="user", content="higher")


@functools.cache
def tokenizer() -> Any:
    return make_tokenizer()


def encode(text: str) -> list[int]:
    return list(tokenizer().encode(text, add_special_tokens=False))


def whole(messages: list[Message]) -> list[int]:
    """The template over a whole conversation."""
    plain = [m.model_dump() for m in messages]
    return encode(tokenizer().apply_chat_template(plain, tokenize=False, add_generation_prompt=True))


@pytest.mark.unit
def test_first_call_is_the_chat_template_with_a_generation_prompt() -> None:
    assert render(tokenizer(), (), (USER,)) == whole([USER])


@pytest.mark.unit
@pytest.mark.parametrize("ended", [True, False])
def test_the_turn_is_closed_once_whether_or_not_the_output_ended(ended: bool) -> None:
    prompt = render(tokenizer(), (), (USER,))
    prefix = prompt + encode("42") + (encode("<|end|>") if ended else [])
    ids = render(tokenizer(), prefix, (HIGHER,))
    assert ids == prompt + encode("42<|end|>\n<|user|>\nhigher<|end|>\n<|assistant|>\n")


@pytest.mark.unit
def test_an_end_of_turn_token_that_is_not_named_special_is_not_doubled() -> None:
    other = make_tokenizer()
    other.eos_token = "<|pad|>"
    end = encode("<|end|>")
    assert end[0] not in other.all_special_ids
    ids = render(other, [*encode("<|user|>\nx"), *end], (HIGHER,))
    assert ids.count(end[0]) == 2


@pytest.mark.unit
def test_recorded_ids_are_kept_even_where_encoding_the_text_again_gives_others() -> None:
    split = [encode(c)[0] for c in "higher"]
    assert split != encode("higher")
    prefix = render(tokenizer(), (), (USER,)) + split
    assert render(tokenizer(), prefix, (HIGHER,))[: len(prefix)] == prefix


@pytest.mark.unit
def test_without_messages_the_ids_are_the_prompt() -> None:
    assert render(tokenizer(), (5, 6, 7), ()) == [5, 6, 7]


@pytest.mark.unit
def test_nothing_at_all_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="empty"):
        render(tokenizer(), (), ())


@pytest.mark.unit
@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{% if loop.last or m.role != 'assistant' %}{{ m.content }}{% endif %}{% endfor %}",
        "{% for m in messages %}{{ m.role }}:{{ m.content }}{% if loop.last %}[end]{% endif %}{% endfor %}",
        "{{ messages | length }}" + TEMPLATE,
        "{% for m in messages %}{{ m.content | truncate(5) }}{% endfor %}",
    ],
)
def test_a_template_that_rewrites_earlier_turns_is_refused(template: str) -> None:
    with pytest.raises(InvalidRequest, match="rewrites earlier turns") as caught:
        render(make_tokenizer(template), (5, 6), (HIGHER,))
    assert caught.value.code == "template_not_prefix_preserving"


@pytest.mark.unit
def test_a_template_that_refuses_a_role_names_its_reason() -> None:
    picky = make_tokenizer("{{ raise_exception('only tools may speak') }}")
    with pytest.raises(InvalidRequest, match="only tools may speak"):
        render(picky, (), (USER,))


@pytest.mark.unit
def test_messages_without_a_template_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="no chat template"):
        render(make_tokenizer(None), (), (USER,))


TEXT = st.text(st.characters(codec="utf-8"), max_size=40)


@pytest.mark.property
@given(answers=st.lists(TEXT, min_size=1, max_size=4), replies=st.lists(TEXT, min_size=4, max_size=4))
def test_extending_turn_by_turn_equals_rendering_the_whole_conversation(answers: list[str], replies: list[str]) -> None:
    ids = render(tokenizer(), (), (USER,))
    conversation = [USER]
    for answer, reply in zip(answers, replies, strict=False):
        message = Message(role="user", content=reply)
        ids = render(tokenizer(), ids + encode(answer + "<|end|>"), (message,))
        conversation += [Message(role="assistant", content=answer), message]
    assert tokenizer().decode(ids) == tokenizer().decode(whole(conversation))
