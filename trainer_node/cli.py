"""`deltawire train`: parse, resolve the settings, run."""

from __future__ import annotations

import argparse

from sync.settings import add_flags, load, to_toml, token_from_environment

from .config import TrainConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the trainer's flags."""
    add_flags(parser, TrainConfig)


def run(args: argparse.Namespace) -> int:
    """Train to the end and return 0. Raises DeltawireError for anything that stops it."""
    config = load(TrainConfig, "train", args)
    if args.print_config:
        print(to_toml(config), end="")
        return 0
    token = token_from_environment()
    from .run import train

    train(config, token)
    return 0
