"""The curriculum as a pure function of group statistics: tasks are drawn by how much their groups can teach."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sync.schema.artifacts import Curriculum, CurriculumEntry


@dataclass
class TaskStats:
    """Groups of one task since the last curriculum version: their number, and sums of useful-pair and success share."""

    groups: int = 0
    useful: float = 0.0
    success: float = 0.0

    def add(self, useful: float, success: float) -> None:
        """Count one group."""
        self.groups += 1
        self.useful += useful
        self.success += success


def next_curriculum(previous: Curriculum, stats: Mapping[str, TaskStats], floor: float) -> Curriculum:
    """Weight of a task = its smoothed useful-pair share, at least `floor`; unseen tasks keep what they had.

    Old and new evidence count half each. Computed from pairs, never from the size of the reward's spread.
    """
    tasks = dict(previous.tasks)
    for task, seen in stats.items():
        if not seen.groups:
            continue
        old = previous.tasks.get(task)
        useful, success = seen.useful / seen.groups, seen.success / seen.groups
        if old is not None and old.useful_share is not None:
            useful = (useful + old.useful_share) / 2
        tasks[task] = CurriculumEntry(
            weight=round(max(floor, useful), 6),
            groups=seen.groups + (old.groups if old else 0),
            useful_share=round(useful, 6),
            success=round(success, 6),
        )
    return Curriculum(environment=previous.environment, default_weight=1.0, tasks=tasks)
