"""`deltawire lint-template`: what it finds, how it says so, and fixes that were tried."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from support.devhub import ROOT, HubProcess, client_env, run_client
from support.templates import OWN, tokenizer_for, trl_template

import deltawire
from inference_space.gateway.turns import Turn
from inference_space.lint import cases, check, fixes
from inference_space.render import render_turns

pytestmark = pytest.mark.unit


def statuses(name: str) -> dict[str, str]:
    return {case.name: case.status for case in check(tokenizer_for(name))}


def save(name: str, folder: Path) -> str:
    tokenizer_for(name).save_pretrained(folder)
    return str(folder)


def test_the_cases_are_those_that_agents_make() -> None:
    names = [case.name for case in cases()]
    assert len(names) == len(set(names)) == 16
    for kind in ("user follow-up", "tool result", "parallel tool results"):
        for more in ("", ", with reasoning", ", with a system prompt", ", with reasoning, with a system prompt"):
            assert kind + more in names


@pytest.mark.parametrize("name", ["chatml", "qwen2_5", "qwen3_training", "qwen3_5_think_training", "mistral"])
def test_templates_that_let_everything_extend(name: str) -> None:
    wrong = {case: status for case, status in statuses(name).items() if status != "ok"}
    if name == "mistral":  # it writes no text beside calls, and so no reasoning: this model has none
        assert {case for case in wrong if "with reasoning" not in case} == set()
    else:
        assert wrong == {}


def test_cleared_thinking_is_found_where_it_happens() -> None:
    found = statuses("qwen3")
    assert {name for name, status in found.items() if status == "rewrites"} == {
        name for name in found if name.startswith("user follow-up") and "with reasoning" in name
    }
    (case,) = [case for case in check(tokenizer_for("qwen3")) if case.name == "user follow-up, with reasoning"]
    assert "reasoning" in case.why
    assert case.saw is not None
    assert case.now is not None
    assert case.saw[0] == case.now[0]
    assert case.saw[1].startswith("<think>")
    assert case.now[1].startswith("Paris")


def test_the_first_differing_token_is_counted_from_the_start() -> None:
    tokenizer = tokenizer_for("forgets")
    (case,) = [case for case in check(tokenizer) if case.name == "user follow-up, with reasoning"]
    assert case.token == len(render_turns(tokenizer, [Turn("user", "Which city is larger?")], []))


def test_what_a_template_refuses_is_told_apart() -> None:
    found = statuses("llama3_1")
    assert found["tool result"] == "ok"
    assert found["parallel tool results"] == "refused"
    assert statuses("gemma3")["tool result"] == "refused"
    assert statuses("phi3")["tool result"] == "refused"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("qwen3", ["qwen3_training.jinja"]),
        ("qwen3_6", ["preserve_thinking = true", "qwen3_6_training.jinja"]),
    ],
)
def test_a_fix_is_named_after_it_was_tried(name: str, words: list[str]) -> None:
    tokenizer = tokenizer_for(name)
    before = tokenizer.chat_template
    named = fixes(tokenizer, check(tokenizer))
    assert tokenizer.chat_template == before
    assert len(named) == len(words)
    for fix, word in zip(named, words, strict=True):
        assert word in fix["fix"]
        assert fix["leaves"] == []
    other = copy.deepcopy(tokenizer)
    other.chat_template = trl_template(f"{name}_training")
    assert {case.status for case in check(other)} == {"ok"}


def test_a_variable_that_helps_nothing_is_not_named() -> None:
    tokenizer = copy.deepcopy(tokenizer_for("forgets"))
    tokenizer.chat_template = OWN["forgets"] + "{# preserve_thinking clear_thinking #}"
    found = check(tokenizer)
    assert any(case.status == "rewrites" for case in found)
    assert fixes(tokenizer, found) == []


def test_a_template_of_which_nothing_is_wrong_needs_no_fix() -> None:
    assert fixes(tokenizer_for("qwen2_5"), check(tokenizer_for("qwen2_5"))) == []


def run(capsys: Any, *words: str) -> tuple[int, str, str]:
    status = deltawire.main(["lint-template", *words])
    out, err = capsys.readouterr()
    return status, out, err


def test_it_says_ok_and_returns_0(tmp_path: Path, capsys: Any) -> None:
    status, out, _ = run(capsys, save("qwen2_5", tmp_path))
    assert status == 0
    assert out.count("OK\n") == 16


def test_it_shows_the_difference_and_the_fix_and_returns_1(tmp_path: Path, capsys: Any) -> None:
    status, out, _ = run(capsys, save("qwen3", tmp_path))
    assert status == 1
    lines = out.splitlines()
    at = next(n for n, line in enumerate(lines) if line.startswith("user follow-up, with reasoning  "))
    assert "rewrites: it leaves out" in lines[at]
    assert "the engine saw" in lines[at + 1]
    assert "⟦<think>" in lines[at + 1]
    assert "it now writes" in lines[at + 2]
    assert "⟦Paris" in lines[at + 2]
    assert "qwen3_training.jinja" in lines[-1]
    assert "then all extend" in lines[-1]


def test_json(tmp_path: Path, capsys: Any) -> None:
    status, out, _ = run(capsys, save("chatml", tmp_path), "--json")
    found = json.loads(out)
    assert (status, found["extends"], found["shows_tools"], found["fixes"]) == (0, True, False, [])
    assert {case["status"] for case in found["cases"]} == {"ok"}


def test_what_is_no_model_is_one_line_and_status_2(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "empty").mkdir()
    broken = tmp_path / "broken"
    save("chatml", broken)
    (broken / "tokenizer.json").write_text("{")
    bare = tmp_path / "bare"
    tokenizer = copy.deepcopy(tokenizer_for("chatml"))
    tokenizer.chat_template = None
    tokenizer.save_pretrained(bare)
    for where in (str(tmp_path / "no such folder"), str(tmp_path / "empty"), str(broken), str(bare)):
        status, out, err = run(capsys, where)
        assert (status, out, len(err.splitlines())) == (2, "", 1), err
        assert where in err


@pytest.mark.integration
def test_of_a_model_on_the_hub_only_the_tokenizer_is_fetched(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    save("qwen2_5", folder)
    (folder / "model.safetensors").write_bytes(b"x" * 1000)
    code = """
import deltawire
from huggingface_hub import constants
api.create_repo("local/linted")
api.upload_folder(repo_id="local/linted", folder_path=sys.argv[1])
status = deltawire.main(["lint-template", "local/linted", "--json"])
missing = deltawire.main(["lint-template", "local/other"])
got = [path.name for path in Path(constants.HF_HUB_CACHE).rglob("*")]
print(json.dumps([status, missing, "tokenizer.json" in got, "model.safetensors" in got]))
"""
    with HubProcess(tmp_path / "hub") as hub:
        env = client_env(tmp_path / "home", hub.url) | {"PYTHONPATH": str(ROOT)}
        assert run_client(env, code, folder) == [0, 2, True, False]
