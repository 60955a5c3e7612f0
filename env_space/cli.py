"""`deltawire env`: run an environment Space."""

from __future__ import annotations

import argparse

from sync import settings
from sync.events import emitter
from sync.serving import bind, serve, until_stopped, url_of, write_ready_file

from .config import EnvConfig

ROOM = 64 << 10
"""Bytes beyond the limit of a frame, so that one that is a little too large is answered and not cut off."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of an environment Space."""
    settings.add_flags(parser, EnvConfig)


def run(args: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM, then return 0. Raises ConfigError when it cannot start."""
    if args.print_config:
        print(settings.print_config(EnvConfig, "env", args), end="")
        return 0
    config = settings.load(EnvConfig, "env", args)
    token = settings.token_from_environment()
    from .app import create_app

    with until_stopped(), bind(config.host, config.port) as listener:
        url = url_of(listener)
        app = create_app(config, token, url)
        if config.ready_file is not None:
            write_ready_file(config.ready_file, url=url)
        emitter("env", config.log)("listening", url=url)
        serve(
            app, listener, max_connections=config.max_connections, read_seconds=config.read_seconds,
            max_frame_bytes=config.openenv.max_frame_bytes + ROOM,
        )  # fmt: skip
    return 0
