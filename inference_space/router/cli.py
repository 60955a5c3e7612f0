"""`deltawire router`: bind the port, watch the replicas, pass calls on until SIGINT or SIGTERM."""

from __future__ import annotations

import argparse
import sys

from sync.errors import ConfigError
from sync.events import emitter
from sync.serving import bind, serve, until_stopped, url_of, write_ready_file
from sync.settings import add_flags, load, print_config, token_from_environment

from .config import RouterConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the settings as flags."""
    add_flags(parser, RouterConfig)


def run(args: argparse.Namespace) -> int:
    """Route with the arguments that `add_arguments` declared; returns the exit status.

    Raises DeltawireError when it cannot start: no token, a setting is wrong, the port is taken.
    """
    if args.print_config:
        sys.stdout.write(print_config(RouterConfig, "router", args))
        return 0
    config = load(RouterConfig, "router", args)
    token = token_from_environment()
    emit = emitter("router", config.log)
    if config.ready_file is not None and not config.ready_file.parent.is_dir():
        raise ConfigError(f"ready_file = {config.ready_file}: its folder does not exist; create it first")
    from .app import create_app

    with until_stopped(), bind(config.host, config.port) as listener:
        url = url_of(listener)

        def announce() -> None:
            emit("listening", url=url, replicas=",".join(config.replicas))
            if config.ready_file is not None:
                write_ready_file(config.ready_file, url=url)

        app = create_app(config, token, emit=emit, on_start=announce)
        serve(app, listener, max_connections=config.max_connections, read_seconds=config.read_seconds)
    emit("stopped")
    return 0
