"""Texts that end an output: found at the id that completes them, and taken out of the answer, never of the ids."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support_tiny import make_tokenizer

from inference_space.answers import text_of_generation
from inference_space.engines.base import Generation
from inference_space.engines.rows import StopTexts
from sync.schema.calls import VersionSpan

pytestmark = pytest.mark.unit


@functools.cache
def tokenizer() -> Any:
    return make_tokenizer()


def first_end(ids: list[int], texts: list[str]) -> int | None:
    """How many ids were sampled when the watch stopped the call."""
    watch = StopTexts.of(tokenizer(), texts)
    assert watch is not None
    return next((n for n in range(1, len(ids) + 1) if watch.ends(ids[:n])), None)


def made(ids: list[int], stopped_by: str) -> Generation:
    span = VersionSpan(version="1@1", start=0, end=len(ids))
    return Generation(ids, [0.0] * len(ids), (span,), "stop", stopped_by)


@settings(deadline=None)
@given(st.text("ab é<|end", max_size=24), st.lists(st.text("ab é<", min_size=1, max_size=4), min_size=1, max_size=3))
def test_a_call_ends_at_the_first_id_that_completes_a_text(text: str, texts: list[str]) -> None:
    ids = tokenizer().encode(text, add_special_tokens=False)
    texts_so_far = [tokenizer().decode(ids[:n]) for n in range(1, len(ids) + 1)]
    wanted = next((n for n, seen in enumerate(texts_so_far, 1) if any(t in seen for t in texts)), None)
    assert first_end(ids, texts) == wanted


def test_without_texts_nothing_is_watched() -> None:
    assert StopTexts.of(tokenizer(), ()) is None


def test_the_answer_ends_before_the_stop_text_and_keeps_all_where_it_is_not_to_be_seen() -> None:
    ids = tokenizer().encode("one Observation: two", add_special_tokens=False)
    assert text_of_generation(tokenizer(), made(ids, "Observation:")) == "one "
    assert text_of_generation(tokenizer(), made(ids, "é")) == "one Observation: two"
    end = tokenizer().eos_token_id
    assert text_of_generation(tokenizer(), made([*ids, end], "")) == "one Observation: two"
