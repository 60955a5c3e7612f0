"""Every error code that an inference Space gives is one that an environment Space knows how to take."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import inference_space
from sync.schema.calls import REFUSED_CODES, TOO_LONG_CODES, TRANSIENT_CODES

pytestmark = pytest.mark.unit


def test_codes_raised_by_inference_are_classified_once() -> None:
    sources = Path(inference_space.__file__).parent.rglob("*.py")
    raised = {code for path in sources for code in re.findall(r'code="([a-z_]+)"', path.read_text())}
    kinds = (TOO_LONG_CODES, REFUSED_CODES, TRANSIENT_CODES)
    assert len(raised) > 8
    assert {code: sum(code in kind for kind in kinds) for code in raised} == dict.fromkeys(raised, 1)
