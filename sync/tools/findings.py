"""What `deltawire verify` finds: problems by key, and what is merely left over."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from ..errors import DeltawireError, ObjectMissing, RejectError, ResyncError


@dataclass
class Findings:
    """problems: key → what is wrong, the first found per key. missing: keys that were listed or named and are not
    there. leftovers: folders and lists that nothing reaches (an interrupted publish or collecting). foreign: keys that
    are none of ours. checked: objects whose content was compared."""

    problems: dict[str, str] = field(default_factory=dict)
    missing: set[str] = field(default_factory=set)
    leftovers: set[str] = field(default_factory=set)
    foreign: list[str] = field(default_factory=list)
    checked: int = 0
    checked_bytes: int = 0

    def add(self, key: str, what: str) -> None:
        """Note a problem of an object."""
        self.problems.setdefault(key, " ".join(what.removeprefix(f"{key}: ").split()))

    def add_missing(self, key: str, what: str) -> None:
        """Note an object that is not there; `settle` may take it back."""
        self.missing.add(key)
        self.add(key, what)

    def passed(self, size: int, objects: int = 1) -> None:
        """Count objects whose content was right."""
        self.checked += objects
        self.checked_bytes += size

    @contextmanager
    def of(self, key: str) -> Iterator[None]:
        """What is wrong with `key` inside becomes a problem of it."""
        try:
            yield
        except ObjectMissing:
            self.add_missing(key, "was listed, but is not there")
        except (RejectError, ResyncError) as error:
            self.add(key, text_of(error))

    def folder_has_problem(self, folder: str) -> bool:
        """True when an object of the folder is named."""
        return any(key.startswith(folder) for key in self.problems)


def text_of(error: DeltawireError) -> str:
    """An error in one line."""
    return " ".join(str(error).split())
