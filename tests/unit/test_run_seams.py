"""The seams of a run: the hint to the inference Space, and the demo's reading of the trainer's log."""

from __future__ import annotations

import io
import subprocess
import sys
from contextlib import closing
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from fastapi import FastAPI
from rich.console import Console
from support_policy import served

from sync.publisher import Published, Stamp
from sync.schema.base import Identity
from trainer_node.demo import _Crew, _watch
from trainer_node.peers import Peer
from trainer_node.run import _Run
from trainer_node.view import RunView

pytestmark = pytest.mark.unit
TOKEN = "a-token-of-sixteen-or-more"
CLOSED = "http://127.0.0.1:9"


def test_a_hint_that_is_refused_or_lost_is_counted_and_ends_nothing() -> None:
    done = Published(Identity(1, 3), Stamp(3, 4), "delta", 10, 100, 1, 50, 0.0, 0.0)
    noted: list[Published] = []
    run: Any = SimpleNamespace(transfer=SimpleNamespace(committed=noted.append), pokes_failed=0)
    with served(FastAPI()) as url:
        for target in (url, CLOSED):  # one answers 404, one is not there
            with closing(Peer(target, TOKEN)) as run.policy:
                run._poke = partial(_Run._poke, run)
                _Run._committed(run, done)
    assert noted == [done, done]
    assert run.pokes_failed == 2


def test_an_event_that_is_written_in_two_parts_is_shown(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    event = '{"event": "evaluated", "when": "before", "success": 0.5, "reward": 0.25, "episodes": 16, "version": "0@1"}'
    code = f"import time; print({event[:40]!r}, end='', flush=True); time.sleep(0.5); print({event[40:]!r})"
    text = io.StringIO()
    with (
        log.open("wb") as out,
        closing(Peer(CLOSED, TOKEN)) as nobody,
        subprocess.Popen([sys.executable, "-c", code], stdout=out) as trainer,
    ):
        crew = cast("_Crew", SimpleNamespace(check=lambda: None))
        _watch(crew, trainer, log, RunView(Console(file=text, width=200)), nobody, nobody)
    assert text.getvalue().startswith("evaluation before training: success 50.0%, reward 0.250 (16 fixed tasks")
