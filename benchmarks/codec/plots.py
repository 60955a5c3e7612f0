"""The results as pictures. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

_OURS = {"tight": "#1b6ca8", "fast": "#4c9ed9", "raw": "#a9cbe8"}
_OTHER, _BOUND = "#b8b2a7", "#c0392b"
_NO_HISTORY = "entropy given the old exponents"
_LINES = {
    "TRL raw": "#6b6459",
    "PULSE": "#c98b2b",
    "NeMo xor": "#5a9a5a",
    "fast": _OURS["fast"],
    "tight": _OURS["tight"],
}


def draw(results: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write bits.png, density.png and speed.png into `folder`, and return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    barred = [case for case in results["cases"] if case["case"] in results["barred"]]
    found = []
    for name, painter, panels in (
        ("bits", _bits, barred), ("density", _density, _models(results["cases"])), ("speed", _speed, results["speeds"]),
    ):  # fmt: skip
        figure = Figure(figsize=(6 * len(panels), 4.5), layout="tight")
        axes = figure.subplots(1, len(panels), squeeze=False)
        for panel, axis in zip(panels, axes[0], strict=True):
            painter(axis, panel)
        path = folder / f"{name}.png"
        figure.savefig(path, dpi=130)
        found.append(path)
    return found


def _models(cases: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    found: dict[str, list[Mapping[str, Any]]] = {}
    for case in cases:
        found.setdefault(case["case"].rpartition("/")[0], []).append(case)
    return list(found.values())


def _bits(axis: Axes, case: Mapping[str, Any]) -> None:
    """Bits per change of every layout, and the bound."""
    names = sorted(case["bits_per_change"], key=lambda name: -float(case["bits_per_change"][name]))
    values = [case["bits_per_change"][name] for name in names]
    bars = axis.barh(names, values, color=[_OURS.get(name, _OTHER) for name in names])
    axis.bar_label(bars, fmt="%.1f", padding=3, fontsize=8)
    bound = case["bound_bits"]["stateless"]
    axis.axvline(bound, color=_BOUND, linewidth=1, label=f"{_NO_HISTORY}: {bound:.2f}")
    axis.set_xlabel("bits per changed element")
    axis.set_title(f"{case['case']}: {100 * case['density']:.2f} % changed", fontsize=10)
    axis.margins(x=0.12)
    axis.legend(fontsize=8, loc="upper right")


def _density(axis: Axes, cases: Sequence[Mapping[str, Any]]) -> None:
    """Percent of the full state on the wire over percent of elements changed, of every case."""
    cases = sorted(cases, key=lambda case: float(case["density"]))
    x = [100 * case["density"] for case in cases]
    for name, colour in _LINES.items():
        y = [100 * case["bytes"][name] / case["full_bytes"] for case in cases]
        axis.plot(x, y, marker="o", markersize=3, linewidth=1, label=name, color=colour)
    y = [100 * case["bound_bits"]["stateless"] * case["changed"] / 8 / case["full_bytes"] for case in cases]
    axis.plot(x, y, linestyle=":", color=_BOUND, label=_NO_HISTORY)
    axis.set(xscale="log", yscale="log", xlabel="% of elements changed", ylabel="% of the full state on the wire")
    axis.set_title(cases[0]["case"].rpartition("/")[0], fontsize=10)
    axis.legend(fontsize=8)


def _speed(axis: Axes, case: Mapping[str, Any]) -> None:
    """Speed over that of copying the state, median with lowest and highest."""
    ratios = {name: spread for name, spread in case["ratios"].items() if name.endswith(("thread", "threads"))}
    names = list(ratios)[::-1]
    middle = [ratios[name]["median"] for name in names]
    error = [[abs(ratios[n]["median"] - ratios[n][side]) for n in names] for side in ("low", "high")]
    colours = [_OURS.get(name.partition(" ")[0], _OTHER) for name in names]
    axis.barh(names, middle, xerr=error, color=colours, error_kw={"linewidth": 1})
    axis.set_xlabel("speed / speed of copying the state with numpy (1 thread)")
    axis.set_title(case["case"], fontsize=10)
