"""What a run shows: bars on a terminal, plain lines elsewhere, and the demo's table at the end."""

from __future__ import annotations

import json
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from sync.schema.calls import SyncStatus
from sync.schema.rollouts import ServiceStatus

PLAIN_EVERY = 20


class RunView:
    """Shows the trainer's events, and the counters of the Spaces, while a run lasts."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False)
        self._spaces: dict[str, Any] = {}
        self._progress = Progress(
            TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn(), TimeElapsedColumn(),
            TimeRemainingColumn(),
        )  # fmt: skip
        self._facts = Text()
        self._live = Live(Group(self._progress, self._facts), console=self._console, transient=True)
        self._bars: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Leave the live display."""
        self._live.stop()

    def say(self, text: str) -> None:
        """Print a line above the live display."""
        self._console.print(text, soft_wrap=True)

    def spaces(self, policy: SyncStatus, env: ServiceStatus) -> None:
        """Note the Spaces' counters for the next refresh."""
        training = [r for r in env.runs if r.purpose == "training"]
        self._spaces = {
            "tok/s": policy.engine.get("tokens_per_second", 0),
            "served": policy.version,
            "ready": sum(r.groups_ready for r in training),
            "checks": policy.digest_checks,
        }

    def line(self, text: str) -> None:
        """Show one line of a trainer's JSON log; lines that are no events stay in the log only."""
        try:
            event = json.loads(text)
        except ValueError:
            return
        if isinstance(event, dict):
            self.show(event)

    def emit(self, event: str, **facts: Any) -> None:
        """An `sync.events.Emit` that shows instead of printing lines."""
        self.show({"event": event, **facts})

    def show(self, event: dict[str, Any]) -> None:
        """Show an event that people follow; the others are left out."""
        handlers = {
            "waiting": self._waiting, "warm_start": self._warm, "step": self._step, "evaluated": self._evaluated,
        }  # fmt: skip
        handler = handlers.get(event.get("event", ""))
        if handler is not None:
            handler(event)

    def _bar(self, name: str, total: int, done: int, facts: list[str], *, plain: bool) -> None:
        """Advance a bar, or say a plain line; a bar that is full gives way to its plain line."""
        if not self._console.is_terminal or done == total:
            if plain or done == total:
                self.say(f"{name}  {done:{len(str(total))}}/{total}  {'  '.join(facts)}")
            if name in self._bars:
                self._progress.remove_task(self._bars.pop(name))
                self._facts.truncate(0)
            return
        if name not in self._bars:
            self._bars[name] = self._progress.add_task(name, total=total)
        self._progress.update(self._bars[name], completed=done)
        self._facts.truncate(0)
        self._facts.append("  ".join(facts))

    def _waiting(self, event: dict[str, Any]) -> None:
        if not self._console.is_terminal:
            return
        self._facts.truncate(0)
        self._facts.append(f"waiting for {event['what']} at {event['url']} (at most {event['seconds']:.0f} s)")

    def _warm(self, event: dict[str, Any]) -> None:
        self._bar("warm start", event["steps"], event["step"], [f"loss {event['loss']:.3f}"], plain=False)

    def _evaluated(self, event: dict[str, Any]) -> None:
        self.say(
            f"evaluation {event['when']} training: success {event['success']:.1%}, reward {event['reward']:.3f} "
            f"({event['episodes']} fixed tasks, weights {event['version']})"
        )

    def _step(self, event: dict[str, Any]) -> None:
        step, steps = event["step"], event["steps"]
        facts = [
            f"reward {event.get('reward', 0):+.2f}",
            f"version {event['version']}",
            f"delta {event['delta_bytes'] / 1e3:.0f} of {event['full_bytes'] / 1e3:.0f} kB",
            f"staleness {event.get('staleness', 0):.1f}",
            f"wait {event.get('wait_s', 0.0):.2f} s",
            f"queue {event['queue']}",
        ]
        if self._spaces:
            facts[-1] += f" + {self._spaces['ready']} groups"
            facts.append(f"{self._spaces['tok/s']:.0f} tok/s")
        self._bar("train", steps, step, facts, plain=step % PLAIN_EVERY == 0)


def table(summary: dict[str, Any], out: Path) -> str:
    """The result table as text."""
    grid = Table(title="deltawire demo", show_header=False, title_justify="left")
    grid.add_column()
    grid.add_column(justify="right")
    full = summary["full_copy_bytes"]
    rows = [
        ("success before → after", f"{summary['success_before']:.1%} → {summary['success_after']:.1%}"),
        ("reward before → after", f"{summary['reward_before']:.3f} → {summary['reward_after']:.3f}"),
        ("evaluation tasks (fixed)", str(summary["evaluation_episodes"])),
        ("steps, versions published", f"{summary['steps']}, {summary['versions']}"),
        ("curriculum versions", str(summary["curriculum_versions"])),
        ("full copy of the weights", f"{full:,} B"),
        (f"mean delta at lr {summary['delta_learning_rate']:g}", _size(summary, "delta", full)),
    ]
    if summary["sparse_delta_bytes_mean"] is not None:
        label = f"{summary['sparse_delta_steps']} deltas at lr {summary['sparse_delta_learning_rate']:g}, mean"
        rows.append((label, _size(summary, "sparse_delta", full)))
    rows += [
        ("state digest checks, failed", f"{summary['digest_checks']}, {summary['digest_failures']}"),
        ("steps per second", f"{summary['steps_per_second']:.2f}"),
        ("time", f"{summary['total_seconds']:.0f} s"),
    ]
    for row in rows:
        grid.add_row(*row)
    console = Console(width=100, highlight=False)
    with console.capture() as capture:
        console.print(grid)
    note = (
        "A model this small needs a large learning rate, so most values change every step and its deltas are dense.\n"
        "At the rates that large models train with few values change: the second figure, same model.\n"
    )
    return capture.get() + note + f"results: {out}/summary.json"


def _size(summary: dict[str, Any], prefix: str, full: int) -> str:
    mean, share = summary[f"{prefix}_bytes_mean"], summary[f"{prefix}_changed_share"]
    return f"{mean:,.0f} B = {mean / full:.1%} ({share:.1%} of values)"
