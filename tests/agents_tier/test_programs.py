"""Agent programs finish a task against the gateway, and the gateway holds exactly what the engine sampled."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from captured import Gateway, check, main_chains
from playing import ALL, Play
from programs import CLAUDE, CODEX, LIBRARIES, MINI, PI, SDKS, SMOLAGENTS, Program

pytestmark = pytest.mark.agents


@pytest.mark.parametrize("program", [CODEX, CLAUDE, *PI, *MINI], ids=str)
def test_a_task_is_one_chain_of_the_ids_that_were_sampled(gateway: Gateway, tmp_path: Path, program: Program) -> None:
    play = Play(gateway, tmp_path, program, "plain")
    play.run(program.start)
    assert play.files() == ALL
    session = check(play.capture)
    (chain,) = main_chains(session)
    assert len(chain["calls"]) == 3
    assert all(call["delivered"] and not call["superseded"] for call in session["calls"])


@pytest.mark.parametrize("program", LIBRARIES, ids=str)
def test_a_library_is_captured_exactly(gateway: Gateway, tmp_path: Path, program: Program) -> None:
    play = Play(gateway, tmp_path, program, "plain")
    play.run(program.start)
    assert play.files() == ALL
    chains = main_chains(check(play.capture))
    two_tasks = [3, 3] if program.name.startswith("openai") else [6]  # conversations of their own, or one
    assert sorted(len(chain["calls"]) for chain in chains) == two_tasks


@pytest.mark.parametrize("program", SDKS, ids=str)
def test_an_sdk_finds_its_dialect_complete(gateway: Gateway, tmp_path: Path, program: Program) -> None:
    play = Play(gateway, tmp_path, program, "plain")
    play.run(program.start)
    assert play.files() == ALL
    session = check(play.capture)
    loops = [chain for chain in session["chains"] if len(chain["calls"]) > 1]
    assert [len(chain["calls"]) for chain in loops] == [3, 3], "streamed and not"
    assert all(call["delivered"] and not call["superseded"] for call in session["calls"])
    assert {call["sampling"]["temperature"] for call in session["calls"]} == {1.0}, "the run's, whatever is asked"
    assert {"temperature": 0.25} in [call["asked"] for call in session["calls"]]


@pytest.mark.parametrize("program", SMOLAGENTS, ids=str)
def test_a_program_that_rewrites_its_past_forks(gateway: Gateway, tmp_path: Path, program: Program) -> None:
    play = Play(gateway, tmp_path, program, "plain")
    play.run(program.start)
    assert play.files() == ALL
    session = check(play.capture)
    assert len(session["calls"]) == 3
    assert all(len(chain["calls"]) == 1 for chain in session["chains"])
    assert all(call["fork"] for call in session["calls"][1:]), "each says why"


@pytest.mark.parametrize("program", [CODEX, CLAUDE, *PI], ids=str)
def test_a_resumed_conversation_stays_one_chain(gateway: Gateway, tmp_path: Path, program: Program) -> None:
    play = Play(gateway, tmp_path, program, "resume")
    play.run(program.start)
    play.run(program.again)
    assert play.files() == ALL
    (chain,) = main_chains(check(play.capture))
    assert len(chain["calls"]) == 6


def test_programs_side_by_side_do_not_mix(gateway: Gateway, tmp_path: Path) -> None:
    plays = []
    for program in (CODEX, *PI):
        (tmp_path / program.name).mkdir()
        plays.append((Play(gateway, tmp_path / program.name, program, "beside"), program))
    with ThreadPoolExecutor(len(plays)) as pool:
        for done in [pool.submit(play.run, program.start) for play, program in plays]:
            done.result()
    for play, _ in plays:
        assert play.files() == ALL
        (chain,) = main_chains(check(play.capture, play.script))
        assert len(chain["calls"]) == 3


@pytest.mark.parametrize("program", [CODEX, CLAUDE, *PI], ids=str)
def test_a_slow_answer_is_waited_for_once(gateway: Gateway, tmp_path: Path, program: Program) -> None:
    """The stream is held open by pings: nobody takes it for dead and asks again."""
    play = Play(gateway, tmp_path, program, "slow")
    play.run(program.start, "slow")
    assert play.files() == ALL
    session = check(play.capture)
    assert len(session["calls"]) == 3
    assert all(call["delivered"] for call in session["calls"])
