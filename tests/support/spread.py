"""How `make test` spreads tests over processes: a plugin of pytest (`-p tests.support.spread`)."""

from __future__ import annotations

from typing import Any

import pytest

WHOLE = (
    "integration/test_loop_kills.py", "integration/test_router.py", "integration/test_checkpoints.py",
    "integration/test_gateway.py", "browser/test_inspector.py",
)  # fmt: skip
"""Modules whose fixtures take longer than their tests: each runs in one process, so that they are set up once."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Tests one by one, but for `WHOLE`. (The mark xdist_group has no effect with pytest 9.2 and pytest-xdist 3.8.)"""
    from xdist.scheduler.loadscope import LoadScopeScheduling  # type: ignore[import-untyped]

    class Spread(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            module = nodeid.partition("::")[0]
            return module if module.endswith(WHOLE) else nodeid

    return Spread(config, log) if config.getvalue("dist") == "loadscope" else None
