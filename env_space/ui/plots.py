"""The Plots tab: SVG drawn here, so that it needs no other host and no package. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from itertools import pairwise

from . import render
from .bodies import Series, Window

WIDTH, HEIGHT, LEFT, BOTTOM = 520, 170, 46, 20
HUES = 8
Points = Sequence[tuple[float, float | None]]


def plots(series: Series) -> str:
    """Reward, version lag, tokens per second, status shares and seconds per stage, over the time of the rollouts."""
    runs = {name: sorted(windows, key=lambda w: w.to) for name, windows in series.runs.items()}
    if not any(runs.values()):
        return render.notice("Nothing to plot", "No rollout is stored yet; the plots follow once a group is complete.")
    stages = sorted({stage for windows in runs.values() for w in windows for stage in w.seconds})
    statuses = sorted({status for windows in runs.values() for w in windows for status in w.statuses})
    every = sorted((w for windows in runs.values() for w in windows), key=lambda w: w.to)
    shares = {s: [(w.to, w.statuses.get(s, 0) / w.rollouts) for w in every] for s in statuses}
    times = {s: [(w.to, w.seconds.get(s)) for w in every] for s in stages}
    charts = [
        chart("mean reward", _of(runs, lambda w: w.reward)),
        chart("version lag", _of(runs, lambda w: w.lag)),
        chart("trained tokens per second", {name: _speed(windows) for name, windows in runs.items()}),
        chart("status shares", shares),
        chart("seconds per stage", times),
    ]
    return f'<div class="dw dw-plots" data-testid="plots">{"".join(charts)}</div>'


def chart(title: str, lines: Mapping[str, Points]) -> str:
    """Lines over time (x in seconds since 1970) with their legend; an unknown y leaves a gap."""
    known = [(x, y) for points in lines.values() for x, y in points if y is not None]
    if not known:
        return (
            f'<figure class="dw-card"><figcaption>{escape(title)}</figcaption><p class="dw-none">unknown</p></figure>'
        )
    x0, x1 = min(x for x, _ in known), max(x for x, _ in known)
    y0, y1 = min(0.0, *(y for _, y in known)), max(y for _, y in known)
    y1 = y1 if y1 > y0 else y0 + 1.0

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - x0) / (x1 - x0) if x1 > x0 else 0.5
        return LEFT + across * (WIDTH - LEFT - 8), HEIGHT - BOTTOM - (y - y0) / (y1 - y0) * (HEIGHT - BOTTOM - 8)

    drawn = "".join(_line(i % HUES, name, points, place) for i, (name, points) in enumerate(lines.items()))
    keys = "".join(f'<span><i class="dw-t dw-v{i % HUES}"></i>{escape(name)}</span>' for i, name in enumerate(lines))
    span = x1 - x0
    across = f"{span / 3600:.1f} h" if span >= 3600 else f"{span / 60:.1f} min" if span >= 60 else f"{span:.0f} s"
    low, high = HEIGHT - BOTTOM, 8
    return (
        f'<figure class="dw-card" data-testid="plot"><figcaption>{escape(title)}</figcaption>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">'
        f'<path class="dw-axis" d="M{LEFT} {high}V{low}H{WIDTH - 8}"/>'
        f'<text x="{LEFT - 6}" y="{high + 6}" text-anchor="end">{_short(y1)}</text>'
        f'<text x="{LEFT - 6}" y="{low}" text-anchor="end">{_short(y0)}</text>'
        f'<text x="{WIDTH - 8}" y="{HEIGHT - 5}" text-anchor="end">{across}</text>{drawn}</svg>'
        f'<p class="dw-legend">{keys}</p></figure>'
    )


def _short(value: float) -> str:
    return f"{value / 1000:,.0f}k" if abs(value) >= 10_000 else f"{value:.3g}"


def _line(hue: int, name: str, points: Points, place: Callable[[float, float], tuple[float, float]]) -> str:
    path, dots, on = [], [], False
    for x, y in points:
        if y is None:
            on = False
            continue
        px, py = place(x, y)
        path.append(f"{'L' if on else 'M'}{px:.1f} {py:.1f}")
        label = f"<title>{escape(name)} {y:.4g}</title>"
        dots.append(f'<circle class="dw-v{hue}" cx="{px:.1f}" cy="{py:.1f}" r="2.5">{label}</circle>')
        on = True
    return f'<path class="dw-line dw-v{hue}" d="{"".join(path)}"/>{"".join(dots)}'


def _of(runs: Mapping[str, Sequence[Window]], value: Callable[[Window], float | None]) -> dict[str, Points]:
    return {name: [(w.to, value(w)) for w in windows] for name, windows in runs.items()}


def _speed(windows: Sequence[Window]) -> Points:
    pairs = pairwise(windows)
    return [(b.to, b.tokens / (b.to - a.to) if b.to > a.to else None) for a, b in pairs]
