"""The inspector's HTML, made by pure functions. All text that comes from a rollout is escaped here."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from types import MappingProxyType
from typing import Literal

from sync.schema.calls import Message
from sync.schema.rollouts import Chain, Rollout, RolloutPage, RolloutSummary, RunInfo, ServiceStatus

Colouring = Literal["mask", "logprob", "version"]

TOKENS_SHOWN = 4_000
MESSAGE_SHOWN = 20_000
CRITERION = "criterion."
_STATUS_TONE = {
    "done": "good",
    "truncated": "warn",
    "timeout": "warn",
    "no_reward": "warn",
    "env_error": "bad",
    "agent_error": "bad",
}
_PROBABILITIES = ((0.9, "p ≥ 0.9"), (0.5, "p ≥ 0.5"), (0.1, "p ≥ 0.1"), (0.01, "p ≥ 0.01"), (0.0, "p < 0.01"))
_HUES = 8


def number(value: float | None) -> str:
    """A reward or part for people: four digits, and `none` (never 0) where it is unknown."""
    return "none" if value is None else f"{value:.4g}"


def age(created_at: float, now: float) -> str:
    """How long ago, in the one unit that fits; `–` without a time. Both are seconds since 1970."""
    if created_at <= 0:
        return "–"
    seconds = max(0.0, now - created_at)
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= size:
            return f"{int(seconds // size)} {unit}"
    return f"{int(seconds)} s"


def versions(low: str | None, high: str | None) -> str:
    """A range of weight versions: `3@1`, `3@1 – 5@1` or `none`."""
    ends = [v for v in (low, high) if v is not None]
    return " – ".join(dict.fromkeys(ends)) or "none"


def notice(title: str, text: str, tone: Literal["info", "bad"] = "info") -> str:
    """A message in place of content: an empty state, or what went wrong and what to do."""
    role = "alert" if tone == "bad" else "status"
    return (
        f'<div class="dw dw-notice dw-{tone}" role="{role}" data-testid="notice">'
        f"<strong>{escape(title)}</strong><p>{escape(text)}</p></div>"
    )


def strip(status: ServiceStatus, now: float) -> str:
    """The header: one card for the service and one per run."""
    pressure = _pill("backpressure", "warn") if status.backpressure else _pill("flowing", "good")
    facts = {
        "policy calls": f"{status.calls:,}",
        "output tokens": f"{status.output_tokens:,}",
        "policy wait": f"{status.policy_wait_seconds:,.1f} s",
        "restored": f"{status.restored_rollouts:,}",
        "refused": f"{status.refused_requests:,}",
    }
    stages = {k: f"{n:,} · {status.stage_seconds.get(k, 0.0):,.0f} s" for k, n in status.stage_active.items()}
    known = ", ".join(status.environments) or "none"
    service = (
        f'<section class="dw-card" data-testid="service"><h3>service {pressure}</h3>'
        f'<p class="dw-soft">environments {escape(known)} · boot {escape(status.boot_id)} · '
        f"up {age(status.started_at, now)}</p>"
        f"{_facts(facts)}{_facts(stages, 'stages: active · total time') if stages else ''}</section>"
    )
    runs = "".join(map(_run, status.runs)) or notice(
        "No run yet",
        "Start a trainer that names this environment Space, or POST /v1/runs with a name, an environment "
        f"({known}) and a policy_url; this page follows by itself.",
    )
    return f'<div class="dw dw-strip" data-testid="strip">{service}{runs}</div>'


def _run(run: RunInfo) -> str:
    counters = {
        "started": run.groups_started,
        "active": run.groups_active,
        "ready": run.groups_ready,
        "leased": run.groups_leased,
        "acked": run.groups_acked,
        "dropped": run.groups_dropped,
    }
    facts = {
        "rollouts": f"{run.rollouts_done:,}",
        "curriculum": run.curriculum or "none",
        "failures": f"{run.infrastructure_failures:,}",
        "redelivered": f"{run.redelivered:,}",
    }
    done = _pill("complete", "good") if run.complete else ""
    error = f'<p class="dw-error">{escape(run.last_error)}</p>' if run.last_error else ""
    return (
        f'<section class="dw-card" data-testid="run"><h3>{escape(run.name)} {_pill(run.purpose)}{done}</h3>'
        f'<p class="dw-soft">environment {escape(run.environment)}</p>'
        f"{_facts({k: f'{v:,}' for k, v in counters.items()}, 'groups', 'dw-six')}{_facts(facts, '', 'dw-six')}"
        f"{error}</section>"
    )


def _neighbours(name: str, group: Sequence[str]) -> str:
    if name not in group or len(group) < 2:
        return ""
    at = group.index(name)
    sides = (("previous", at - 1), ("next", at + 1))
    links = "".join(
        f'<a href="?rollout={escape(group[i])}" data-rollout="{escape(group[i])}" data-step="{word}">{word}</a>'
        for word, i in sides
        if 0 <= i < len(group)
    )
    return (
        f'<nav class="dw-nav" aria-label="rollouts of this group">{at + 1} of {len(group)} in its group {links}</nav>'
    )


def _facts(
    facts: Mapping[str, str], title: str = "", kind: str = "", links: Mapping[str, str] = MappingProxyType({})
) -> str:
    head = f'<p class="dw-label">{escape(title)}</p>' if title else ""
    shown = {k: f'<a href="{escape(links[k])}">{escape(v)}</a>' if k in links else escape(v) for k, v in facts.items()}
    cells = "".join(f"<div><dt>{escape(k)}</dt><dd>{v}</dd></div>" for k, v in shown.items())
    return f'{head}<dl class="dw-facts {kind}">{cells}</dl>'


def _pill(text: str, tone: str = "plain") -> str:
    return f'<span class="dw-pill dw-{tone}">{escape(text)}</span>'


def table(page: RolloutPage, chosen: str, now: float) -> str:
    """A page of the rollout list; each row links to its rollout, that of the rollout `chosen` is marked."""
    if not page.rollouts:
        return notice(
            "No rollouts here",
            "None is stored that matches. Choose another run or status above, or wait for the first group of a "
            "run to close: rollouts appear when their group is complete.",
        )
    heads = "".join(f"<th>{h}</th>" for h in ("rollout", "task", "status", "reward", "", "weights", "trained", "age"))
    rows = "".join(_row(r, chosen, now) for r in page.rollouts)
    return (
        '<div class="dw dw-scroll"><table class="dw-table" data-testid="rollouts">'
        f"<thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _row(line: RolloutSummary, chosen: str, now: float) -> str:
    name, task = escape(line.id), escape(line.task)
    current = ' aria-current="true"' if line.id == chosen else ""
    cells = (
        ("id", f'<a href="?rollout={name}" title="{name}">{escape(_short(line))}</a>'),
        ("task", f'<span title="{task} · {escape(line.environment)} · {escape(line.run)}">{task}</span>'),
        ("status", _pill(line.status, _STATUS_TONE[line.status])),
        ("reward", _reward(line.reward)),
        ("success", _success(line.success)),
        ("weights", escape(versions(line.version_min, line.version_max))),
        ("tokens", f"{line.tokens:,}"),
        ("age", age(line.created_at, now)),
    )
    body = "".join(f'<td class="dwc-{kind}">{html}</td>' for kind, html in cells)
    return f'<tr data-testid="row" data-rollout="{name}"{current}>{body}</tr>'


def _short(line: RolloutSummary) -> str:
    """The group's number and the rollout's place in it; the whole id, which repeats run and boot, is the title."""
    parts = line.id.removeprefix(f"{line.run}.").split(".")
    return f"{parts[0]} · {parts[-1]}" if len(parts) == 3 else line.id


def _reward(value: float | None) -> str:
    return f'<span class="dw-{"none" if value is None else "number"}">{number(value)}</span>'


def _success(value: Literal[True, False] | None) -> str:
    mark, word, tone = {
        True: ("✓", "success", "yes"),
        False: ("✗", "no success", "no"),
        None: ("–", "success unknown", "none"),
    }[value]
    return f'<span class="dw-{tone}" title="{word}" aria-label="{word}">{mark}</span>'


def rollout(item: Rollout, now: float, group: Sequence[str] = ()) -> str:
    """One rollout turn by turn: facts, reward parts, findings, timing, and each message as a bubble.

    `group`: the ids of its group in order, for the links to the one before and the one after. Rewards that are named
    `criterion.<id>` are the rubric's and stand apart from the environment's own.
    """
    total = sum(len(chain.ids) for chain in item.chains)
    facts = {
        "task": item.task,
        "environment": item.environment,
        "group": f"{item.group} · {item.index}",
        "run": item.run,
        "weights": versions(item.version_min, item.version_max),
        "curriculum": item.harness.curriculum or "none",
        "guidance": item.harness.guidance or "none",
        "rubric": item.harness.rubric or "none",
        "tokens": f"{total:,} · {item.trainable_tokens:,} trained",
        "age": age(item.created_at, now),
    }
    seconds = {stage: f"{value:.3g} s" if value >= 0.0005 else "< 0.001 s" for stage, value in item.seconds.items()}
    unusable = "" if item.usable else _pill("not usable", "warn")
    judged = {k: v for k, v in item.rewards.items() if k.startswith(CRITERION)}
    criteria = {k.removeprefix(CRITERION): v for k, v in judged.items()}
    parts = {k: v for k, v in item.rewards.items() if k not in judged}
    links = {
        name: f"?tab=channels&run={item.run}&channel={name}&version={version}"
        for name, version in item.harness.model_dump().items()
        if version
    }
    return (
        f'<article class="dw dw-card" data-testid="rollout" data-rollout="{escape(item.id)}">'
        f"<h3>{escape(item.id)} {_pill(item.status, _STATUS_TONE[item.status])}{unusable}</h3>"
        f'<p class="dw-big" data-testid="reward">reward {_reward(item.reward)} {_success(item.success)}</p>'
        f"{_neighbours(item.id, group)}{bars('reward parts', parts)}{bars('rubric criteria', criteria)}"
        f"{_findings(item.findings)}{_facts(facts, links=links)}"
        f"{_facts(seconds, 'time') if seconds else ''}{bubbles(item.messages)}</article>"
    )


def bars(title: str, values: Mapping[str, float]) -> str:
    """Values as labelled bars, the largest at full width; nothing for none."""
    if not values:
        return ""
    most = max(map(abs, values.values())) or 1.0
    rows = "".join(
        f'<li><span>{escape(k)}</span><i class="{"dw-minus" if v < 0 else ""}" '
        f'style="width:{abs(v) / most * 100:.0f}%"></i><b>{number(v)}</b></li>'
        for k, v in values.items()
    )
    return f'<p class="dw-label">{escape(title)}</p><ul class="dw-bars" data-testid="bars">{rows}</ul>'


def _findings(findings: Iterable[str]) -> str:
    items = "".join(f"<li>{escape(f)}</li>" for f in findings)
    return f'<ul class="dw-findings" data-testid="findings">{items}</ul>' if items else ""


def bubbles(messages: Iterable[Message]) -> str:
    """A conversation, each message as a bubble, long ones cut at MESSAGE_SHOWN characters."""
    parts: list[str] = []
    turn = 0
    for message in messages:
        turn += message.role == "assistant"
        who = f"{message.role} · turn {turn}" if message.role == "assistant" else message.role
        text = escape(message.content[:MESSAGE_SHOWN]) or '<span class="dw-none">empty</span>'
        cut = len(message.content) - MESSAGE_SHOWN
        more = f'<p class="dw-soft">{cut:,} more characters are not shown</p>' if cut > 0 else ""
        parts.append(
            f'<div class="dw-bubble dw-{message.role}" data-testid="message"><small>{who}</small>'
            f"<div>{text}</div>{more}</div>"
        )
    body = "".join(parts) or '<p class="dw-soft">This rollout holds no messages.</p>'
    return f'<p class="dw-label">conversation</p><div class="dw-talk">{body}</div>'


def tokens(item: Rollout, colouring: Colouring) -> str:
    """The chains' token ids, coloured, the first TOKENS_SHOWN of all; forks from chain 1 are marked."""
    if not item.chains:
        return notice("No tokens", "No call of this rollout finished, so it has no chain.")
    spans = [s.version for chain in item.chains for s in chain.weight_versions]
    hues = {version: i % _HUES for i, version in enumerate(dict.fromkeys(spans))}
    left, parts = TOKENS_SHOWN, []
    for at, chain in enumerate(item.chains):
        fork = _fork(item.chains[0], chain, left) if at else -1
        head = f"chain {at + 1} of {len(item.chains)} · {len(chain.ids):,} tokens, {sum(chain.mask):,} trained"
        head += f" · forks from chain 1 at position {fork}" if fork >= 0 else ""
        parts.append(f'<p class="dw-label">{head}</p><div class="dw-chain" data-testid="chain">')
        parts.append(_cells(chain, colouring, hues, left, fork) + "</div>")
        left -= min(left, len(chain.ids))
    total = sum(len(chain.ids) for chain in item.chains)
    if total > TOKENS_SHOWN:
        rest = f"The first {TOKENS_SHOWN:,} of {total:,} tokens are shown; GET /v1/rollouts/{item.id} has all."
        parts.append(f'<p class="dw-soft" data-testid="cut">{escape(rest)}</p>')
    return (
        f'<div class="dw dw-tokens" data-testid="tokens" data-colouring="{colouring}">'
        f"{_legend(colouring, hues)}{''.join(parts)}</div>"
    )


def _fork(first: Chain, chain: Chain, most: int) -> int:
    pairs = zip(first.ids[:most], chain.ids[:most], strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first.ids), len(chain.ids)))


def _cells(chain: Chain, colouring: Colouring, hues: Mapping[str, int], most: int, fork: int) -> str:
    shown = len(chain.ids[:most])
    version: list[str | None] = [None] * shown
    for span in chain.weight_versions:
        width = max(0, min(span.end, shown) - span.start)
        version[span.start : span.start + width] = [span.version] * width
    cells = []
    for at in range(shown):
        by, logprob = version[at], chain.logprobs[at] if chain.mask[at] else None
        title = f"position {at} · id {chain.ids[at]}"
        title += " · context" if logprob is None else f" · logprob {logprob:.4f} (p {math.exp(min(logprob, 0)):.3f})"
        title += f" · version {by}" if by else ""
        kind = _kind(colouring, logprob, None if by is None else hues[by])
        mark = " dw-fork" if at == fork else ""
        cells.append(f'<span class="dw-t {kind}{mark}" title="{title}">{chain.ids[at]}</span>')
    return "".join(cells)


def _kind(colouring: Colouring, logprob: float | None, hue: int | None) -> str:
    if colouring == "version":
        return "dw-c" if hue is None else f"dw-v{hue}"
    if logprob is None:
        return "dw-c"
    if colouring == "mask":
        return "dw-m"
    return f"dw-p{next((i for i, (low, _) in enumerate(_PROBABILITIES) if math.exp(min(logprob, 0)) >= low), 4)}"


def _legend(colouring: Colouring, hues: Mapping[str, int]) -> str:
    entries = [("dw-c", "context")]
    if colouring == "mask":
        entries.append(("dw-m", "trained"))
    elif colouring == "logprob":
        entries += [(f"dw-p{i}", text) for i, (_, text) in enumerate(_PROBABILITIES)]
    else:
        entries += [(f"dw-v{hue}", version) for version, hue in hues.items()]
    keys = "".join(f'<span><i class="dw-t {kind}"></i>{escape(text)}</span>' for kind, text in entries)
    return f'<p class="dw-legend" data-testid="legend">{keys}</p>'
