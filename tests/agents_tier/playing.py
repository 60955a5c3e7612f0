"""One program in a session and a place of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
from captured import Capture, Gateway
from play import marker
from programs import Ended, Place, Program, Start, run

ALL = {"one.txt", "two.txt", "three.txt"}


class Play:
    """`program` in the session `<program>-<case>`. Skips the test when the program is not installed."""

    def __init__(self, gateway: Gateway, root: Path, program: Program, case: str) -> None:
        if not program.binary.exists():
            pytest.skip(f"{program.binary.name} is not installed; run make test-agents")
        self.script = f"{program.name}-{case}"
        self.capture: Capture = gateway.session(self.script)
        self.place = Place.make(self.capture.url, self.capture.key, root)

    def run(self, start: Start | None, flavour: str = "plain", *, task: str = "") -> None:
        """Start the program with a task of this script (or `task`); it must end well."""
        assert start is not None
        task = task or f"Write the three files, please. {marker(self.script, flavour)}"
        ended: Ended = run(start(self.place, task), self.place)
        assert ended.code == 0, ended

    def files(self, part: str = "") -> set[str]:
        """What the tools of the script (or of a subagent's `part`) wrote: the proof that they ran."""
        script = self.script + part
        found = {p.name.removeprefix(f"{script}-"): p.read_text() for p in self.place.work.glob(f"{script}-*.txt")}
        assert set(found.values()) <= {f"hé {script}"}
        return set(found)
