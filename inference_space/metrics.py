"""`GET /metrics`: the status as Prometheus reads it (text exposition format 0.0.4)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from sync.schema.calls import SyncStatus

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_GAUGES = frozenset(
    {
        "active", "queued", "tokens_per_second", "ready", "paused", "lag", "pause_seconds_last", "sessions_open",
        "max_slots", "max_len", "version_number",
    }
)  # fmt: skip


def exposition(status: SyncStatus, sessions: Mapping[str, int]) -> str:
    """Every number of the status, the engine's counters and the gateway's, as `deltawire_<name>`. Names of things that
    only grow end in `_total`; texts are labels of `deltawire_info`."""
    return "".join(_lines({**_numbers(status), **sessions}, status))


def _numbers(status: SyncStatus) -> dict[str, float]:
    fields = {**status.model_dump(exclude={"engine", "ways"}), **{f"engine_{k}": v for k, v in status.engine.items()}}
    found = {name: float(value) for name, value in fields.items() if isinstance(value, bool | int | float)}
    if status.version is not None:
        found["version_number"] = float(status.version.partition("@")[0])
    return found


def _lines(numbers: Mapping[str, float], status: SyncStatus) -> Iterator[str]:
    for name, value in numbers.items():
        gauge = name.removeprefix("engine_") in _GAUGES
        full = f"deltawire_{name}" if gauge else f"deltawire_{name}_total"
        yield f"# TYPE {full} {'gauge' if gauge else 'counter'}\n{full} {value:.17g}\n"
    labels = {"version": status.version, "head": status.head, "channel_uid": status.channel_uid}
    shown = ",".join(f'{name}="{value or ""}"' for name, value in labels.items())
    yield f"# TYPE deltawire_info gauge\ndeltawire_info{{{shown}}} 1\n"
