"""What a schedule is made of, drawn from its seed: faults, habits, how many take part."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random

from sync import PublisherOptions
from sync.term import TermOptions

from .store import KINDS, Weather


@dataclass
class Setup:
    """What a schedule is made of."""

    folder: Path
    weather: Weather = field(default_factory=Weather)
    term: TermOptions = field(default_factory=TermOptions)
    codec: str = "fast"
    anchor_share: float = 1.0
    largest_span: int = 64
    rows: int = 6
    pin_ttl: float | None = None
    followers: int = 2
    trainers: int = 1
    operators: int = 0
    documents: bool = False
    steps: int = 12
    kill_rate: float = 0.0
    engine_failures: float = 0.0
    chaos_steps: int = 350

    def publisher_options(self) -> PublisherOptions:
        """The options of every publisher of this run."""
        return PublisherOptions(
            codec=self.codec, anchor_share=self.anchor_share, term=self.term, largest_span=self.largest_span
        )


def drawn(rng: Random) -> Setup:
    """A setup: which faults, how often, how many actors, which habits."""
    kinds = rng.sample((*KINDS, "down"), rng.randint(0, 5))
    lag = rng.choice((0.0, 2.0, 6.0))
    weather = Weather({k: rng.choice((0.01, 0.03, 0.1)) for k in kinds}, lag=lag, stray=rng.choice((2.0, 9.0)))
    if "down" in weather.rates:
        weather.rates["down"] = 0.01
    grace = rng.choice((80.0, 150.0))
    term = TermOptions(
        settle=lag + rng.choice((0.0, 1.0)), deadline=rng.choice((20.0, 60.0)), catchup_every=rng.choice((0, 2, 5)),
        keep_anchors=rng.choice((1, 1, 2)), grace=grace, collect_every=rng.choice((1, 3)),
    )  # fmt: skip
    return Setup(
        folder=Path(),
        weather=weather,
        term=term,
        codec=rng.choice(("raw", "fast", "fast")),
        anchor_share=rng.choice((0.2, 1.0, 4.0)),
        largest_span=rng.choice((0, 4, 16)),
        rows=rng.choice((2, 10, 60, 100)),
        pin_ttl=rng.choice((None, 60.0, 400.0)),
        followers=rng.randint(1, 3),
        trainers=rng.choice((1, 1, 1, 2)),
        operators=rng.choice((0, 1)),
        documents=rng.random() < 0.3,
        steps=rng.randint(6, 16),
        kill_rate=rng.choice((0.0, 0.0, 0.004, 0.02)),
        engine_failures=rng.choice((0.0, 0.0, 0.1)),
    )


def calm(rng: Random) -> Setup:
    """A drawn setup with habits that publish, compact and collect a lot."""
    setup = drawn(rng)
    setup.term = replace(setup.term, grace=80.0, collect_every=1, keep_anchors=1, catchup_every=2)
    setup.weather, setup.kill_rate, setup.steps = Weather({"slow": 0.02}, lag=setup.weather.lag), 0.0, 16
    setup.anchor_share, setup.trainers = 0.2, 1
    return setup


def pinned(rng: Random) -> Setup:
    """Readers that hold long pins, and a collector in a hurry."""
    setup = calm(rng)
    setup.pin_ttl, setup.followers, setup.steps = 400.0, 3, 24
    return setup


def spans(rng: Random) -> Setup:
    """Few anchors, every span."""
    setup = calm(rng)
    setup.anchor_share, setup.largest_span, setup.rows = 9.0, 16, 100
    return setup


def lossy(rng: Random) -> Setup:
    """Replies are lost and batches torn."""
    setup = drawn(rng)
    setup.weather.rates = {"lost": 0.1, "partial": 0.1, "late": 0.1, "refused": 0.03}
    setup.kill_rate = 0.01
    return setup


def rivals(rng: Random) -> Setup:
    """Two trainers claim one channel at about the same time, and listings lag."""
    setup = drawn(rng)
    setup.trainers, setup.kill_rate = 2, 0.0
    setup.weather = Weather({"stale": 0.3}, lag=6.0)
    setup.term = replace(setup.term, settle=6.0)
    return setup


def forks(rng: Random) -> Setup:
    """Rivals, and followers that see both."""
    setup = rivals(rng)
    setup.codec, setup.followers, setup.largest_span, setup.anchor_share = "raw", 3, 0, 9.0
    return setup


def stale(rng: Random) -> Setup:
    """Heads are seen as they were, and old ones come again."""
    setup = rivals(rng)
    setup.weather = Weather({"stale": 0.4, "again": 0.3}, lag=6.0, stray=12.0)
    setup.followers, setup.steps = 3, 24
    return setup


def damaged(rng: Random) -> Setup:
    """Readers get other bytes, and engines break off."""
    setup = drawn(rng)
    setup.weather = Weather({"damaged": 0.2}, lag=2.0)
    setup.engine_failures, setup.followers = 0.4, 3
    return setup


PROFILES: tuple[Callable[[Random], Setup], ...] = (
    drawn,
    drawn,
    drawn,
    drawn,
    pinned,
    spans,
    lossy,
    forks,
    stale,
    damaged,
)
"""Half of all seeds have any setup, the others one that seeks something."""


def of_seed(seed: int) -> Setup:
    """The setup of a seed."""
    rng = Random(f"setup {seed}")
    return rng.choice(PROFILES)(rng)
