"""The tier's own measure: whatever a capture has other than it was sampled is noticed. Needs no agent program."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from captured import Capture, Gateway, check, verify
from play import marker

pytestmark = pytest.mark.agents
Change = Callable[[dict[str, Any]], None]


@pytest.fixture(scope="module")
def capture(gateway: Gateway) -> Capture:
    """Two turns and a repeat of the second, which nobody goes on from."""
    capture = gateway.session("check")
    messages: list[dict[str, Any]] = [{"role": "user", "content": marker("check")}]
    with httpx.Client(base_url=capture.url, headers={"authorization": f"Bearer {capture.key}"}, timeout=60) as http:
        for follow_up in ("Go on.", "And on."):
            answer = http.post("/v1/chat/completions", json={"model": "policy", "messages": messages})
            assert answer.status_code == 200, answer.text
            messages += [answer.json()["choices"][0]["message"], {"role": "user", "content": follow_up}]
    return capture


def _change_id(session: dict[str, Any]) -> None:
    session["chains"][0]["chain"]["ids"][5] += 1


def _change_sampled_id(session: dict[str, Any]) -> None:
    session["chains"][0]["chain"]["ids"][-1] += 1


def _change_mask(session: dict[str, Any]) -> None:
    session["chains"][0]["chain"]["mask"][-1] = 0


def _train_a_prompt(session: dict[str, Any]) -> None:
    session["chains"][0]["chain"]["mask"][0] = 1


def _change_logprob(session: dict[str, Any]) -> None:
    session["chains"][0]["chain"]["logprobs"][-1] -= 0.5


def _change_version(session: dict[str, Any]) -> None:
    session["chains"][0]["chain"]["weight_versions"][-1]["version"] = "9@9"


def _lose_a_call(session: dict[str, Any]) -> None:
    session["calls"].pop()


def _lose_a_chain(session: dict[str, Any]) -> None:
    session["chains"].pop()


def _train_twice(session: dict[str, Any]) -> None:
    session["chains"].append(session["chains"][0])


def _change_a_record(session: dict[str, Any]) -> None:
    session["calls"][0]["output_ids"][0] += 1


CHANGES = [
    _change_id, _change_sampled_id, _change_mask, _train_a_prompt, _change_logprob, _change_version, _lose_a_call,
    _lose_a_chain, _train_twice, _change_a_record,
]  # fmt: skip


def test_two_turns_are_one_chain(capture: Capture) -> None:
    session = check(capture)
    assert [len(chain["calls"]) for chain in session["chains"]] == [2]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__.strip("_"))
def test_a_changed_capture_is_noticed(capture: Capture, change: Change) -> None:
    session = copy.deepcopy(capture.read())
    change(session)
    with pytest.raises(AssertionError):
        verify(session, capture.sampled())
