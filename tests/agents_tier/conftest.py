"""One gateway process for the whole tier."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from captured import Gateway

TOKEN = "agents-tier-token-0123456789"


@pytest.fixture(scope="session")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """The Space with a scripted engine, in a process of its own."""
    folder = tmp_path_factory.mktemp("gateway")
    ready, log, printed = folder / "ready.json", folder / "engine.jsonl", folder / "printed.txt"
    env = {**os.environ, "DELTAWIRE_TOKEN": TOKEN, "OMP_NUM_THREADS": "1"}
    argv = [sys.executable, str(Path(__file__).with_name("gateway.py")), str(ready), str(log)]
    with printed.open("w") as out, subprocess.Popen(argv, env=env, stdout=out, stderr=out) as child:
        try:
            deadline = time.monotonic() + 90
            while not ready.exists():
                assert child.poll() is None, printed.read_text()
                assert time.monotonic() < deadline, f"the gateway was not ready in time: {printed.read_text()}"
                time.sleep(0.05)
            url = json.loads(ready.read_text())["url"]
            with httpx.Client(base_url=url, headers={"Authorization": f"Bearer {TOKEN}"}, timeout=60) as http:
                yield Gateway(url, http, log)
        finally:
            child.terminate()
            try:
                child.wait(15)
            except subprocess.TimeoutExpired:
                child.kill()
