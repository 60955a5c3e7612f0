"""Chains of a session: any order of calls, forks, retries and parallel branches trains each sampled token once."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inference_space.gateway.sessions import Entry, chains_of, judged
from sync.schema.calls import Sampling, VersionSpan
from sync.schema.sessions import CallRecord

pytestmark = pytest.mark.property

STEPS = st.lists(
    st.tuples(
        st.integers(0, 7),  # which earlier call it goes on from (8 or none yet: a new conversation)
        st.sampled_from(["extend", "extend", "extend", "repeat", "parallel", "new"]),
        st.booleans(),  # the answer arrived
        st.integers(0, 3),  # output ids
        st.sampled_from([("policy", ("bash",), "s"), ("policy", (), "title"), ("policy", ("bash",), "other")]),
    ),
    max_size=14,
)


def play(steps: list[tuple[int, str, bool, int, tuple[str, tuple[str, ...], str]]]) -> list[Entry]:
    """Entries of a session. Output ids are unique, so that each can be looked for in the chains."""
    entries: list[Entry] = []
    fresh = itertools.count(1_000)
    clock = 0.0
    for at, move, arrived, size, kind in steps:
        older = entries[at % len(entries)] if entries else None
        parent, started = "", clock + 1
        prompt: tuple[int, ...] = (next(fresh),)
        if older is not None and move == "extend":
            record = older.record
            prompt, parent = (*record.prompt_ids, *record.output_ids, *prompt), record.id
        elif older is not None and move != "new":
            prompt, parent = older.record.prompt_ids, older.record.parent
            started = older.record.started_at + (0.25 if move == "parallel" else 1)
        same = older if move != "new" else None
        clock = max(clock, started + 0.5)
        output = tuple(next(fresh) for _ in range(size))
        record = CallRecord(
            id=f"rec_{len(entries)}",
            parent=parent,
            dialect="chat",
            model="policy",
            prompt_ids=prompt,
            output_ids=output,
            logprobs=(-1.0,) * size,
            weight_versions=(VersionSpan(version="1@1", start=0, end=size),) if size else (),
            finish_reason="stop",
            text="",
            sampling=Sampling(),
            started_at=started,
            seconds=0.5,
        )
        entries.append(Entry(record, same.kind if same else kind, delivered=arrived))
    return entries


@settings(max_examples=300, deadline=None)
@given(STEPS)
def test_each_sampled_token_is_trained_once_or_superseded(
    steps: list[tuple[int, str, bool, int, tuple[str, tuple[str, ...], str]]],
) -> None:
    calls = judged(play(steps))
    chains = chains_of(calls, ("main", "subagent"))
    trained = Counter(token for c in chains for token, mask in zip(c.chain.ids, c.chain.mask, strict=True) if mask)
    wanted = Counter(t for call in calls if not call.superseded and call.role != "side" for t in call.output_ids)
    assert trained == wanted
    assert sorted(name for c in chains for name in c.calls) == sorted(c.id for c in calls if not c.superseded)
    parents = {call.parent for call in calls}
    assert not any(call.superseded and call.id in parents for call in calls)


@settings(max_examples=100, deadline=None)
@given(STEPS)
def test_context_is_what_the_engine_saw(
    steps: list[tuple[int, str, bool, int, tuple[str, tuple[str, ...], str]]],
) -> None:
    calls = {call.id: call for call in judged(play(steps))}
    for chain in chains_of(tuple(calls.values()), ("main", "side", "subagent")):
        last = calls[chain.calls[-1]]
        assert chain.chain.ids == last.prompt_ids + last.output_ids
        for name in chain.calls:
            call = calls[name]
            assert chain.chain.ids[: len(call.prompt_ids)] == call.prompt_ids
        if chain.fork_at is not None:
            others = [calls[c].prompt_ids + calls[c].output_ids for c in calls if c not in chain.calls]
            assert any(ids[: chain.fork_at] == chain.chain.ids[: chain.fork_at] for ids in others)


def test_a_cut_answer_is_superseded_and_two_equal_subagents_are_not() -> None:
    kind = ("policy", ("bash",), "s")
    cut = play([(0, "new", False, 2, kind), (0, "repeat", True, 2, kind)])
    assert [c.superseded for c in judged(cut)] == [True, False]
    read = play([(0, "new", True, 2, kind), (0, "repeat", True, 2, kind)])
    assert [c.superseded for c in judged(read)] == [False, False]
    used = play([(0, "new", True, 2, kind), (0, "repeat", True, 2, kind), (1, "extend", True, 2, kind)])
    assert [c.superseded for c in judged(used)] == [True, False, False]
    twins = play([(0, "new", True, 2, kind), (0, "parallel", True, 2, kind), (1, "extend", True, 2, kind)])
    assert [c.superseded for c in judged(twins)] == [False, False, False]
