"""HTML of the Tasks, Queue, Channels and Play tabs, by pure functions. All text from outside is escaped here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any
from urllib.parse import quote

from sync.schema.artifacts import ARTIFACT_CHANNELS
from sync.schema.calls import Message
from sync.schema.rollouts import ServiceStatus

from . import render
from .bodies import Artifact, ChannelLine, Channels, EnvironmentInfo, TaskStats

ROWS = 500
TEXT_SHOWN = 2_000


def grid(name: str, heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A plain table; the cells of `rows` are HTML already, `heads` are text."""
    top = "".join(f'<th scope="col">{escape(h)}</th>' for h in heads)
    body = "".join(f'<tr data-testid="{name}-row">{"".join(f"<td>{c}</td>" for c in row)}</tr>' for row in rows)
    return (
        f'<div class="dw dw-scroll" tabindex="0" role="region" aria-label="{escape(name)}">'
        f'<table class="dw-grid" data-testid="{name}"><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def tasks(
    environments: Iterable[EnvironmentInfo], stats: Sequence[TaskStats], every: Mapping[str, Sequence[str]]
) -> str:
    """Each environment, and its tasks with what is stored of them; `every`: the task keys by environment."""
    of: dict[str, dict[str, TaskStats]] = {}
    for stat in stats:
        of.setdefault(stat.environment, {})[stat.task] = stat
    parts = []
    for info in environments:
        found = of.pop(info.name, {})
        parts.append(_environment(info.name, f"{info.about} · at most {info.max_turns:,} turns", info.tasks))
        parts.append(_task_table(found, [*found, *(t for t in every.get(info.name, ()) if t not in found)]))
    for name, found in of.items():
        parts.append(_environment(name, "rolled before; this Space does not list it", len(found)))
        parts.append(_task_table(found, list(found)))
    return f'<div class="dw dw-stack" data-testid="environments">{"".join(parts)}</div>'


def _environment(name: str, about: str, count: int) -> str:
    return f'<h3>{escape(name)}</h3><p class="dw-soft">{escape(about)} · {count:,} tasks</p>'


def _task_table(found: Mapping[str, TaskStats], names: Sequence[str]) -> str:
    rows = []
    for name in names[:ROWS]:
        stat = found.get(name)
        if stat is None:
            rows.append((escape(name), "0", "0", render.number(None), "none"))
            continue
        share = "none" if stat.success is None else f"{stat.success:.0%}"
        rows.append((escape(name), f"{stat.rollouts:,}", f"{stat.rewarded:,}", render.number(stat.reward), share))
    more = f'<p class="dw-soft">{len(names) - ROWS:,} more tasks are not shown</p>' if len(names) > ROWS else ""
    return grid("tasks", ("task", "rollouts", "with reward", "mean reward", "success"), rows) + more


def queue(status: ServiceStatus) -> str:
    """Leases, groups ready, in flight and redelivered, backpressure, and failure counters, run by run."""
    rows = [
        (
            escape(run.name), f"{run.groups_active:,}", f"{run.groups_ready:,}", f"{run.groups_leased:,}",
            f"{run.groups_acked:,}", f"{run.redelivered:,}", f"{run.groups_dropped:,}",
            f"{run.infrastructure_failures:,}", escape(run.last_error) or "none",
        )
        for run in status.runs
    ]  # fmt: skip
    heads = ("run", "in flight", "ready", "leased", "acked", "redelivered", "dropped", "failures", "last error")
    stages = [
        (escape(k), f"{n:,}", f"{status.stage_seconds.get(k, 0.0):,.1f} s") for k, n in status.stage_active.items()
    ]
    word = "backpressure: groups wait for the trainer" if status.backpressure else "flowing: nothing waits too long"
    return (
        f'<div class="dw dw-stack" data-testid="queue"><p><strong>{word}</strong> · refused requests '
        f"{status.refused_requests:,} · restored rollouts {status.restored_rollouts:,}</p>"
        f"{grid('groups', heads, rows)}{grid('stages', ('stage', 'episodes in it', 'total time'), stages)}</div>"
    )


def channels(found: Channels, run: str) -> str:
    """The log of every channel of a run, newest version first."""
    parts = [f'<p class="dw-soft">{escape(found.url)}</p>', *(_channel(line, run) for line in found.channels)]
    return f'<div class="dw dw-stack" data-testid="channels">{"".join(parts)}</div>'


def _channel(line: ChannelLine, run: str) -> str:
    state = "split" if line.split else "closed" if line.closed else "open"
    rows = []
    for v in line.versions:
        made = ", ".join(f"{name} {','.join(ids)}" for name, ids in v.harness.items())
        facts = [f"against weights {v.measured_against}" if v.measured_against else "", made, v.error]
        rows.append(
            (
                link(run, line.channel, v.version), escape(v.kind), f"{v.bytes:,} B",
                "none" if v.step is None else f"{v.step:,}", "none" if v.age is None else f"{v.age:,.0f} s",
                escape(v.digest.partition(":")[2][:12]), escape(" · ".join(f for f in facts if f)),
            )
        )  # fmt: skip
    heads = ("version", "kind", "size", "step", "older by", "digest", "made with")
    return (
        f'<h3>{escape(line.channel)}</h3><p class="dw-soft">head {escape(line.head or "none")} · writer '
        f"{escape(line.writer)} · {state} · {line.live:,} live</p>{grid('versions', heads, rows)}"
    )


def link(run: str, channel: str, version: str) -> str:
    """A version as a link to its place in the Channels tab, or as text where it has no document."""
    if channel not in ARTIFACT_CHANNELS:
        return escape(version)
    return f'<a href="{escape(address(run, channel, version))}">{escape(version)}</a>'


def address(run: str, channel: str, version: str) -> str:
    """The address, relative to the page, of one artifact version."""
    return (
        f"?tab=channels&run={quote(run, safe='')}&channel={quote(channel, safe='')}&version={quote(version, safe='')}"
    )


def difference(old: Artifact | None, new: Artifact) -> str:
    """Two versions of an artifact side by side: what was added, removed or changed; without `old` the document."""
    left, right = (_entries(old) if old else {}), _entries(new)
    names = [*right, *(n for n in left if n not in right)]
    rows, counts = [], {"added": 0, "removed": 0, "changed": 0, "same": 0}
    for name in names:
        a, b = left.get(name), right.get(name)
        kind = "same" if a == b or old is None else "added" if a is None else "removed" if b is None else "changed"
        counts[kind] += 1
        rows.append((kind, name, a, b))
    rows.sort(key=lambda row: row[0] == "same")
    body = "".join(_pair(*row, alone=old is None) for row in rows[:ROWS])
    more = f'<p class="dw-soft">{len(rows) - ROWS:,} more entries are not shown</p>' if len(rows) > ROWS else ""
    told = f"{new.channel} {new.version}" if old is None else f"{new.channel} {old.version} to {new.version}"
    said = "" if old is None else " · " + ", ".join(f"{n} {kind}" for kind, n in counts.items())
    return (
        f'<div class="dw dw-stack" data-testid="difference"><p><strong>{escape(told)}</strong>{said}</p>'
        f'<div class="dw-diff">{body}</div>{more}</div>'
    )


def _entries(artifact: Artifact) -> dict[str, dict[str, Any]]:
    document = artifact.document
    entries: dict[str, dict[str, Any]] = {}
    for name, value in document.items():
        if name in ("criteria", "entries"):
            entries |= {str(e["id"]): {k: v for k, v in e.items() if k != "id"} for e in value}
        elif name == "tasks":
            entries |= value
        else:
            entries.setdefault("(document)", {})[name] = value
    return entries


def _pair(kind: str, name: str, a: dict[str, Any] | None, b: dict[str, Any] | None, *, alone: bool) -> str:
    changed = {k for k in {*(a or {}), *(b or {})} if (a or {}).get(k) != (b or {}).get(k)} if a and b else set()
    sides = [b] if alone else [a, b]
    cells = "".join(f"<div>{_fields(side, changed)}</div>" for side in sides)
    return (
        f'<section class="dw-pair dw-{kind}" data-testid="pair" data-kind="{kind}"><h4>{escape(name)} '
        f'<span class="dw-pill">{"" if alone else kind}</span></h4><div class="dw-sides">{cells}</div></section>'
    )


def _fields(side: Mapping[str, Any] | None, changed: set[str]) -> str:
    if side is None:
        return '<span class="dw-none">not there</span>'
    cells = []
    for name, value in side.items():
        text = escape(("none" if value is None else str(value))[:TEXT_SHOWN])
        cells.append(f"<p><small>{escape(name)}</small> {f'<mark>{text}</mark>' if name in changed else text}</p>")
    return "".join(cells)


def game(
    title: str, talk: Sequence[Message], rewards: Mapping[str, float] | None, *, done: bool, success: bool | None
) -> str:
    """An episode that is played by hand: what was said so far, and at its end the reward and its parts."""
    end = ""
    if done:
        word = {True: "success", False: "no success", None: "success unknown"}[success]
        total = None if rewards is None else rewards.get("reward")
        parts = render.bars("reward parts", {k: v for k, v in (rewards or {}).items() if k != "reward"})
        end = f'<p class="dw-big" data-testid="played">reward {render.number(total)} · {word}</p>{parts}'
    turns = sum(message.role == "assistant" for message in talk)
    state = "over" if done else "your turn"
    return (
        f'<article class="dw dw-card" data-testid="game"><h3>{escape(title)}</h3>'
        f'<p class="dw-soft">{turns:,} turns · {state}</p>{render.bubbles(talk)}{end}</article>'
    )
