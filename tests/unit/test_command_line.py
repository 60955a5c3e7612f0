"""`deltawire COMMAND` without the extra that the command needs."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("command", "missing", "extra"),
    [
        ("env", "fastapi", "env"),
        ("demo", "rich", "all"),
        ("train --run r --policy-url http://p", "torch", "trainer"),
        ("lint-template m", "transformers", "inference"),
    ],
)
def test_a_missing_package_is_one_line_that_names_the_extra(
    command: str, missing: str, extra: str, tmp_path: pytest.TempPathFactory
) -> None:
    words = [*command.split(), *(["--env-urls", '["http://e"]'] if command.startswith("train") else [])]
    code = f"import sys; sys.modules[{missing!r}] = None; import deltawire; sys.exit(deltawire.main({words!r}))"
    environ = {"DELTAWIRE_TOKEN": "a-token-of-sixteen-or-more", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=str(tmp_path), env=environ, timeout=120
    )
    assert done.returncode == 2
    assert done.stderr.strip().splitlines() == [
        f"deltawire {words[0]}: needs the package {missing}, which is not installed: pip install 'deltawire[{extra}]'"
    ]
