"""Agent programs against `deltawire inference` itself: a real bucket, a real model with random weights, real logprobs.

The model says nothing sensible, so no tool runs; what counts is that every captured logprob is what the model gives.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest
from captured import Capture, Gateway
from conftest import TOKEN
from programs import MINI, PI, Command, Place, Program, run
from scripted import make_tokenizer
from support_tiny import assert_close_to, make_checkpoint, publishing, reference, wait_until

from sync import open_store

pytestmark = pytest.mark.agents


class Space(NamedTuple):
    """A running Space and the checkpoint that it serves."""

    gateway: Gateway
    checkpoint: Path


@pytest.fixture(scope="module")
def space(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Space]:
    """`deltawire inference` behind a folder as its bucket."""
    root = tmp_path_factory.mktemp("real")
    tokenizer = make_tokenizer()
    checkpoint = make_checkpoint(
        root / "model", vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, max_position_embeddings=8192
    )
    tokenizer.save_pretrained(checkpoint)
    ready = root / "ready.json"
    flags = ["--run", root / "run", "--folder", root / "mirror", "--ready-file", ready, "--log", "none"]
    limits = ["--max-slots", 4, "--max-len", 6000]
    store = open_store(str(root / "run"), create=True, writable=True)
    env = {**os.environ, "DELTAWIRE_TOKEN": TOKEN, "OMP_NUM_THREADS": "1"}
    argv = [sys.executable, "-m", "deltawire", "inference", *map(str, flags + limits)]
    with publishing(store, checkpoint), subprocess.Popen(argv, env=env) as child:
        try:
            wait_until(lambda: ready.exists() or child.poll() is not None, 120)
            url = json.loads(ready.read_text())["url"]
            with httpx.Client(base_url=url, headers={"Authorization": f"Bearer {TOKEN}"}, timeout=60) as http:
                wait_until(lambda: http.get("/ready").status_code == 200, 120)
                (root / "none").touch()
                yield Space(Gateway(url, http, root / "none"), checkpoint)
        finally:
            child.terminate()
            child.wait(30)


def _limited(program: Program, place: Place, task: str) -> Command:
    command = program.start(place, task)
    if program in MINI:  # a policy that never calls a tool is asked again and again
        command.argv.extend(["-c", "mini.yaml", "-c", "agent.step_limit=2"])
    return command


@pytest.mark.parametrize("program", [PI[0], PI[2], MINI[0]], ids=str)
def test_captured_logprobs_are_the_models(space: Space, tmp_path: Path, program: Program) -> None:
    if not program.binary.exists():
        pytest.skip(f"{program.binary.name} is not installed; run make test-agents")
    capture: Capture = space.gateway.session(f"{program.name}-real", max_tokens=48)
    place = Place.make(capture.url, capture.key, tmp_path)
    ended = run(_limited(program, place, "Say hello."), place)
    session = capture.read()
    assert ended.code == 0, ended
    assert session["calls"], ended
    for entry in session["chains"]:
        ids, mask, logprobs = (entry["chain"][name] for name in ("ids", "mask", "logprobs"))
        assert any(mask)
        wanted = reference(space.checkpoint, ids, 1)
        assert_close_to(
            [found for found, m in zip(logprobs[1:], mask[1:], strict=True) if m],
            [right for right, m in zip(wanted, mask[1:], strict=True) if m],
            tolerance=1e-3,
        )
