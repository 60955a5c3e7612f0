"""What a session captured, held against what the engine really did."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx


@dataclass(frozen=True)
class Gateway:
    """The running gateway: its URL, the Space's token as headers, and the engine's log."""

    url: str
    http: httpx.Client
    log: Path

    def session(self, name: str, **settings: Any) -> Capture:
        """Open the session `name` (`settings`: see `sync.schema.sessions.SessionRequest`)."""
        answer = self.http.post("/v1/sessions", json={"id": name, "purpose": "training", **settings})
        assert answer.status_code in (200, 201), answer.text
        made = answer.json()
        return Capture(self, name, made["key"], self.url + made["path"], self.log.stat().st_size)


@dataclass(frozen=True)
class Capture:
    """One session. `since`: where the engine's log stood when it was opened."""

    gateway: Gateway
    name: str
    key: str
    url: str
    since: int

    def sampled(self, script: str = "") -> list[dict[str, Any]]:
        """What the engine did since: all of it, as a gateway's tests run one after the other, or that of `script`."""
        with self.gateway.log.open("rb") as file:
            file.seek(self.since)
            lines = [json.loads(line) for line in file]
        return [line for line in lines if not script or line["script"] == script]

    def read(self) -> dict[str, Any]:
        """The session as the gateway tells it."""
        answer = self.gateway.http.get(f"/v1/sessions/{self.name}")
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found


def check(capture: Capture, script: str = "") -> dict[str, Any]:
    """Assert that the session holds what the engine saw and sampled, exactly (`script`: when others played beside it);
    returns the session."""
    session, sampled = capture.read(), capture.sampled(script)
    assert sampled, "the engine was never asked"
    verify(session, sampled)
    return session


def verify(session: dict[str, Any], sampled: list[dict[str, Any]]) -> None:
    """Assert that `session` is what `sampled` was.

    Every call of the engine is one recorded call with equal prompt, output, logprobs and versions. Every sampled id of
    a call that was not superseded (and no side call) stands in exactly one chain with mask 1, its logprob beside it,
    behind exactly the ids that the engine saw before it; everything else has mask 0.
    """
    assert Counter(map(_facts, session["calls"])) == Counter(map(_facts, sampled))
    calls = {call["id"]: call for call in session["calls"]}
    assert len(calls) == len(session["calls"])
    held: Counter[str] = Counter()
    for entry in session["chains"]:
        _check_chain(entry, calls)
        held.update(entry["calls"])
    superseded = {name for name, call in calls.items() if call["superseded"]}
    assert held == Counter(calls.keys() - superseded), "each call that stands is in exactly one chain"


def _facts(call: dict[str, Any]) -> str:
    spans = [(s["version"], s["start"], s["end"]) for s in call["weight_versions"]]
    return json.dumps([call["prompt_ids"], call["output_ids"], call["logprobs"], spans])


def _check_chain(entry: dict[str, Any], calls: dict[str, dict[str, Any]]) -> None:
    chain = entry["chain"]
    size = len(chain["ids"])
    assert size == len(chain["mask"]) == len(chain["logprobs"])
    mask = [0] * size
    for name in entry["calls"]:
        call = calls[name]
        start = len(call["prompt_ids"])
        end = start + len(call["output_ids"])
        assert chain["ids"][:end] == call["prompt_ids"] + call["output_ids"], "what the engine saw is what is trained"
        assert chain["logprobs"][start:end] == call["logprobs"]
        mask[start:end] = [int(entry["role"] != "side")] * (end - start)
        for span in call["weight_versions"]:
            where = (span["version"], span["start"] + start, span["end"] + start)
            assert all(_version_at(chain, i) == where[0] for i in range(where[1], where[2]))
    assert [int(m) for m in chain["mask"]] == mask
    assert size == max(len(calls[n]["prompt_ids"]) + len(calls[n]["output_ids"]) for n in entry["calls"])


def _version_at(chain: dict[str, Any], index: int) -> str | None:
    with suppress(StopIteration):
        return next(str(s["version"]) for s in chain["weight_versions"] if s["start"] <= index < s["end"])
    return None


def main_chains(session: dict[str, Any]) -> list[dict[str, Any]]:
    """The chains of the program's own conversation, side calls and subagents left out."""
    return [entry for entry in session["chains"] if entry["role"] == "main"]
