"""What real programs do when something goes wrong or their history is rewritten, and what is captured then."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from captured import Gateway, check, main_chains
from play import marker
from playing import ALL, Play
from programs import CLAUDE, CODEX, LIBRARIES, MINI, PI, Program, claude, codex

pytestmark = pytest.mark.agents
CODERS = [CODEX, CLAUDE, *PI]


@pytest.mark.parametrize(
    ("program", "status"),
    [(p, "500") for p in (CODEX, CLAUDE, PI[0], MINI[0], LIBRARIES[-1])] + [(p, "429") for p in (CODEX, CLAUDE, PI[1])],
    ids=str,
)
def test_a_refused_request_is_repeated_and_leaves_no_trace(
    gateway: Gateway, tmp_path: Path, program: Program, status: str
) -> None:
    play = Play(gateway, tmp_path, program, status)
    play.run(program.start)
    assert play.files() == ALL
    session = check(play.capture)
    (chain,) = main_chains(session)
    assert len(chain["calls"]) == len(session["calls"])


@pytest.mark.parametrize("program", PI, ids=str)
def test_an_answer_that_was_cut_and_asked_again_is_superseded(
    gateway: Gateway, tmp_path: Path, program: Program
) -> None:
    play = Play(gateway, tmp_path, program, "cut")
    play.run(program.start)
    assert play.files() == ALL
    session = check(play.capture)
    assert [call["superseded"] for call in session["calls"]] == [False, True, False, False]
    (chain,) = main_chains(session)
    assert len(chain["calls"]) == 3


def test_what_an_agent_keeps_of_a_cut_answer_is_no_sample(gateway: Gateway, tmp_path: Path) -> None:
    """codex sends the finished items of a cut answer back, as if they had been the whole, and gets another behind."""
    play = Play(gateway, tmp_path, CODEX, "cut")
    play.run(CODEX.start)
    assert play.files() == ALL
    session = check(play.capture)
    assert len(session["calls"]) == 4
    kept = session["calls"][1]
    later = [chain for chain in session["chains"] if session["calls"][-1]["id"] in chain["calls"]]
    assert kept["id"] not in later[0]["calls"]
    assert sum(later[0]["chain"]["mask"]) == sum(
        len(call["output_ids"]) for call in session["calls"] if call["id"] in later[0]["calls"]
    )


@pytest.mark.parametrize("program", CODERS, ids=str)
def test_broken_arguments_are_captured_as_sampled(gateway: Gateway, tmp_path: Path, program: Program) -> None:
    """Some programs answer an error, some repair the call and run it; the sampled text is what is recorded."""
    play = Play(gateway, tmp_path, program, "broken")
    play.run(program.start, "broken")
    assert {"two.txt", "three.txt"} <= play.files()
    session = check(play.capture)
    assert len(session["calls"]) == 3
    (call,) = session["calls"][0]["tool_calls"]
    assert call["arguments"].startswith("{ "), "as sampled"
    with pytest.raises(ValueError, match="char"):
        json.loads(call["arguments"])


@pytest.mark.parametrize("program", [CODEX, CLAUDE], ids=str)
def test_subagents_in_parallel_are_chains_of_their_own(gateway: Gateway, tmp_path: Path, program: Program) -> None:
    play = Play(gateway, tmp_path, program, "agents")
    play.run(program.start, "agents")
    assert play.files() == {"one.txt"}
    assert play.files(".a") == play.files(".b") == ALL
    session = check(play.capture)
    (chain,) = main_chains(session)
    assert len(chain["calls"]) >= 3
    parts = [entry for entry in session["chains"] if entry["role"] == "subagent"]
    assert sorted(len(entry["calls"]) for entry in parts) == [3, 3]
    assert len(session["chains"]) == 3


def test_compaction_by_command_starts_a_new_chain(gateway: Gateway, tmp_path: Path) -> None:
    play = Play(gateway, tmp_path, CLAUDE, "compact")
    play.run(CLAUDE.start)
    play.run(claude("-c"), task="/compact")
    play.run(claude("-c"), task=f"Go on. {marker(play.script)}")
    session = check(play.capture)
    assert len(session["calls"]) == 7
    lengths = sorted(len(chain["calls"]) for chain in session["chains"])
    assert lengths == [1, 3, 3], "before, the summary, after"
    assert _after_summary(session)


def test_compaction_by_length_starts_a_new_chain(gateway: Gateway, tmp_path: Path) -> None:
    play = Play(gateway, tmp_path, CODEX, "compact")
    play.run(codex(more="model_auto_compact_token_limit = 10000"))
    assert play.files() == ALL
    session = check(play.capture)
    assert len(session["calls"]) >= 4
    assert len(session["chains"]) > 1
    assert _after_summary(session)


def _after_summary(session: dict[str, Any]) -> bool:
    """A summary was sampled, and no token of it is trained twice: what follows has it in its prompt, with mask 0."""
    told = [call for call in session["calls"] if "<summary>" in call["text"]]
    later = session["calls"][session["calls"].index(told[0]) + 1 :] if told else []
    return bool(later) and all(call["parent"] not in {c["id"] for c in told} for call in later)
