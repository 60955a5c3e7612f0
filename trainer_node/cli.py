"""`deltawire train`: parse, resolve the settings, run."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from typing import NoReturn

from sync.events import emitter
from sync.settings import add_flags, load, print_config, token_from_environment
from sync.stores import open_store

from .config import TrainConfig, make_folder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the trainer's flags."""
    add_flags(parser, TrainConfig)


def _stop(number: int, _: object) -> NoReturn:
    """SIGTERM and a closed terminal unwind like Ctrl-C: what is in flight is committed, the heads are closed."""
    raise SystemExit(128 + number)


def run(args: argparse.Namespace) -> int:
    """Train to the end and return 0. Raises DeltawireError for anything that stops it."""
    if args.print_config:
        print(print_config(TrainConfig, "train", args), end="")
        return 0
    config = load(TrainConfig, "train", args)
    token = token_from_environment()
    make_folder(config.out)
    open_store(config.run, create=True)  # folders are tried before torch is loaded, which takes seconds
    os.environ.setdefault("TRACKIO_DIR", str(config.out.absolute() / "trackio"))  # trackio reads it when imported
    from .run import train

    signal.signal(signal.SIGTERM, _stop)
    signal.signal(signal.SIGHUP, _stop)
    if config.log != "text" or not sys.stderr.isatty():
        train(config, token, emitter("train", config.log))
        return 0
    from rich.console import Console

    from .view import RunView

    with RunView(Console(stderr=True, highlight=False)) as view:
        train(config, token, view.emit)
    return 0
