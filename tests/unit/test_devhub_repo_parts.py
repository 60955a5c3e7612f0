"""Small decisions of the local Hub's repositories and Spaces."""

from __future__ import annotations

import pytest

pytest.importorskip("starlette", reason="needs the extra `hub`")

from sync.devhub.repo_cards import parse_card
from sync.devhub.repo_commit import MAX_REGULAR_BYTES, upload_mode
from sync.devhub.responses import HubError
from sync.devhub.spaces import Event, next_stage, setting

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("stage", "event", "runnable", "after"),
    [
        ("NO_APP_FILE", "commit", True, "RUNNING"),
        ("RUNNING", "commit", False, "NO_APP_FILE"),
        ("RUNNING", "pause", True, "PAUSED"),
        ("PAUSED", "commit", True, "PAUSED"),
        ("PAUSED", "hardware", True, "PAUSED"),
        ("PAUSED", "restart", True, "RUNNING"),
        ("PAUSED", "restart", False, "NO_APP_FILE"),
        ("RUNNING", "hardware", True, "RUNNING"),
    ],
)
def test_the_stage_of_a_space(stage: str, event: Event, runnable: bool, after: str) -> None:
    assert next_stage(stage, event, runnable=runnable) == after


@pytest.mark.parametrize(
    ("path", "size", "sample", "mode"),
    [
        ("a.txt", 5, b"hello", "regular"),
        ("a.txt", MAX_REGULAR_BYTES, b"hello", "regular"),
        ("a.txt", MAX_REGULAR_BYTES + 1, b"hello", "lfs"),
        ("a.txt", 5, b"he\0lo", "lfs"),
        ("A.SafeTensors", 5, b"hello", "lfs"),
        ("bin", 5, b"hello", "regular"),
        ("dir.bin/a", 5, b"hello", "regular"),
    ],
)
def test_what_is_uploaded_before_the_commit(path: str, size: int, sample: bytes, mode: str) -> None:
    assert upload_mode(path, size, sample) == mode


def test_cards() -> None:
    assert parse_card("# no metadata") == {}
    assert parse_card("---\r\na: 1\r\n---\r\n# Title") == {"a": 1}
    assert parse_card("---\n1: [2026-01-02, .inf, null]\n---") == {"1": ["2026-01-02", "inf", None]}
    for text in ("---\n- a\n---\n", "---\na: b: c\n---\n", "---\n" + "[" * 5000 + "\n---\n"):
        with pytest.raises(ValueError, match=r"^[^\n]+$"):
            parse_card(text)


def test_a_refused_secret_is_not_repeated() -> None:
    for body in ({"key": "K", "value": ["hide me"]}, {"key": "a b", "value": "hide me"}, {"value": "hide me"}):
        with pytest.raises(HubError) as refused:
            setting(body)
        assert "hide me" not in refused.value.message
