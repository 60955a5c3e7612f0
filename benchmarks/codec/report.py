"""The bars, their verdicts, and the tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

AT_MOST, AT_LEAST = "at most", "at least"
FEWEST = 5
"""Rounds without which no spread is worth the name."""
PER_CHANGE = 24
"""Bytes per change that memory may rise by: three times index, old and new bits of a bf16 element."""
_SIZE_BARS = (
    ("fast", "TRL raw", 0.20), ("fast", "NeMo xor", 0.70),
    ("tight", "TRL raw", 0.145), ("tight", "NeMo xor", 0.52), ("tight", "PULSE", 0.30),
)  # fmt: skip
_SPEED_BARS = (
    ("fast encode, 1 thread", 0.25, AT_LEAST), ("fast apply, 1 thread", 0.5, AT_LEAST),
    ("tight encode, 1 thread", 0.1, AT_LEAST), ("tight apply, 1 thread", 0.1, AT_LEAST),
    ("fast encode, 2 threads / 1", 1.6, AT_LEAST), ("fast apply, 2 threads / 1", 1.6, AT_LEAST),
    ("tight encode, 2 threads / 1", 1.6, AT_LEAST), ("tight apply, 2 threads / 1", 1.6, AT_LEAST),
    ("incremental digest / fast apply", 0.1, AT_MOST), ("incremental digest / tight apply", 0.1, AT_MOST),
)  # fmt: skip


class Row(NamedTuple):
    """One figure against its bar. of: what stands behind it, "exact", "one run", or how many rounds; only of rounds do
    median, low and high differ."""

    case: str
    what: str
    median: float
    low: float
    high: float
    bar: float
    sense: str
    verdict: str
    of: str


def verdict(low: float, high: float, bar: float, sense: str) -> str:
    """met or missed where the whole spread is on one side of the bar (on it counts as met), else undecided."""
    good = [value <= bar if sense == AT_MOST else value >= bar for value in (low, high)]
    return "met" if all(good) else "undecided" if any(good) else "missed"


def rows(results: Mapping[str, Any]) -> list[Row]:
    """Every bar that the results (see `cli.measure`) hold a figure for."""
    wanted = results["barred"]
    found: list[Row] = []
    for case in (case for case in results["cases"] if case["case"] in wanted):
        found += _size_rows(case)
    for case in results["speeds"]:
        found += _speed_rows(case)
    for case in results["memory"]:
        found += _memory_rows(case)
    worst = max(one["bytes"] / (1.01 * one["full"] + 4096) for one in results["worst_cases"])
    found.append(_one("dense and tiny", "largest payload / (full state + 1 % + 4 KiB)", worst, 1.0))
    return found


def _one(case: str, what: str, value: float, bar: float, of: str = "exact") -> Row:
    return Row(case, what, value, value, value, bar, AT_MOST, verdict(value, value, bar, AT_MOST), of)


def _size_rows(case: Mapping[str, Any]) -> Iterator[Row]:
    name, size = case["case"], case["bytes"]
    for ours, theirs, bar in _SIZE_BARS:
        yield _one(name, f"{ours} / {theirs}", size[ours] / size[theirs], bar)
    if bound := case["bound_bits"]["stateless"]:
        yield _one(name, "tight / stateless bound", case["bits_per_change"]["tight"] / bound, 1.06)
    yield _one(name, "bytes of a patch in memory per change", case["patch_bytes_per_change"], 6.0)


def _speed_rows(case: Mapping[str, Any]) -> Iterator[Row]:
    for what, bar, sense in _SPEED_BARS:
        spread = case["ratios"][what]
        low, high = spread["low"], spread["high"]
        decided = verdict(low, high, bar, sense) if spread["rounds"] >= FEWEST else "undecided"
        yield Row(case["case"], what, spread["median"], low, high, bar, sense, decided, f"{spread['rounds']} rounds")


def _memory_rows(case: Mapping[str, Any]) -> Iterator[Row]:
    """Peaks over one segment and what the changes may cost; and their rise when the state is larger, over a segment."""
    usual, wider = case["usual"], case["wider"]
    for what in ("encode", "apply"):
        peak = f"{case['codec']} {what}: peak memory"
        name = f"{peak} / (segment + {PER_CHANGE} B per change)"
        yield _one(case["case"], name, usual[what] / (usual["segment"] + PER_CHANGE * usual["changed"]), 1.0, "one run")
        name = f"{peak} at {case['times']} x the state, more than at 1 x / segment"
        yield _one(case["case"], name, (wider[what] - usual[what]) / usual["segment"], 1.0, "one run")


# --- text


def text(results: Mapping[str, Any]) -> str:
    """Everything as tables: sizes, bars, speeds."""
    parts = [_sizes_table(model, cases) for model, cases in _by_model(results["cases"]).items()]
    for case in results["speeds"]:
        rates = case["gigabytes_per_second"]
        lines = [
            [
                name,
                *(_number(spread[side]) for side in ("median", "low", "high")),
                _number(rates[name]) if name in rates else "",
            ]
            for name, spread in case["ratios"].items()
        ]
        parts.append(grid([[case["case"], "ratio", "low", "high", "GB/s"], *lines]))
    lines = [
        [row.case, row.what, _number(row.median), _range(row), f"{row.sense} {row.bar:g}", row.verdict]
        for row in (Row(**one) for one in results["bars"])
    ]
    parts.append(grid([["case", "figure", "median", "low to high", "bar", "verdict"], *lines], left=2))
    return "\n\n".join(parts)


def _range(row: Row) -> str:
    return f"{_number(row.low)} to {_number(row.high)}" if "rounds" in row.of else row.of


def _number(value: float) -> str:
    return f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"


def _by_model(cases: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    found: dict[str, list[Mapping[str, Any]]] = {}
    for case in cases:
        found.setdefault(case["case"].rpartition("/")[0], []).append(case)
    return found


def _sizes_table(model: str, cases: Sequence[Mapping[str, Any]]) -> str:
    """Bits per change: one column per case, the layouts from the largest to the smallest in the first of them."""
    cases = sorted(cases, key=lambda case: float(case["density"]))
    bits = cases[0]["bits_per_change"]
    table = [
        [model or "bits per change", *(case["case"].rpartition("/")[2] for case in cases)],
        ["changed %", *(f"{100 * case['density']:.2f}" for case in cases)],
        ["of these 1 ULP %", *(f"{100 * case['one_ulp']:.1f}" for case in cases)],
    ]
    for name in sorted(bits, key=lambda name: -float(bits[name])):
        table += [[name, *(f"{case['bits_per_change'][name]:.2f}" for case in cases)]]
    for name in cases[0]["bound_bits"]:
        table += [[f"bound: {name}", *(f"{case['bound_bits'][name]:.2f}" for case in cases)]]
    return grid(table)


def grid(table: Sequence[Sequence[str]], left: int = 1) -> str:
    """Rows in columns as wide as their widest cell; the first `left` of them begin at the left."""
    widths = [max(len(row[n]) for row in table) for n in range(len(table[0]))]
    lines = []
    for row in table:
        cells = enumerate(zip(row, widths, strict=True))
        lines.append("  ".join(cell.ljust(width) if n < left else cell.rjust(width) for n, (cell, width) in cells))
    return "\n".join(line.rstrip() for line in lines)
