"""The one tool that the driven libraries offer."""

from __future__ import annotations

import subprocess


def bash(command: str) -> str:
    """Run a shell command and return what it printed.

    Args:
        command: The command line.
    """
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=20, check=False)
    return f"exit {done.returncode}\n{done.stdout}{done.stderr}"
