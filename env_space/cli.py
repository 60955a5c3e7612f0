"""`deltawire env`: run an environment Space."""

from __future__ import annotations

import argparse

from sync import settings
from sync.serving import bind, serve, until_stopped, url_of, write_ready_file

from .config import EnvConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of an environment Space."""
    settings.add_flags(parser, EnvConfig)


def run(args: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM, then return 0. Raises ConfigError when it cannot start."""
    config = settings.load(EnvConfig, "env", args)
    if args.print_config:
        print(settings.to_toml(config), end="")
        return 0
    token = settings.token_from_environment()
    from .app import create_app

    with until_stopped(), bind(config.host, config.port) as listener:
        url = url_of(listener)
        app = create_app(config, token, url)
        if config.ready_file is not None:
            write_ready_file(config.ready_file, url=url)
        serve(app, listener)
    return 0
