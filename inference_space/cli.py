"""`deltawire inference`: bind the port, follow the run, answer calls until SIGINT or SIGTERM."""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from contextlib import ExitStack
from typing import NoReturn

from sync.events import emitter
from sync.settings import add_flags, load, to_toml, token_from_environment

from .config import InferenceConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the settings as flags."""
    add_flags(parser, InferenceConfig)


def run(args: argparse.Namespace) -> int:
    """Run the Space with the arguments that `add_arguments` declared; returns the exit status.

    Raises DeltawireError when it cannot start: no token, no such run, port or mirror folder taken.
    """
    config = load(InferenceConfig, "inference", args)
    if args.print_config:
        sys.stdout.write(to_toml(config))
        return 0
    signal.signal(signal.SIGTERM, _stop)
    signal.signal(signal.SIGINT, _stop)
    try:
        _run(config)
    except SystemExit as end:
        if end.code != 0:
            raise
    return 0


def _stop(*_: object) -> NoReturn:
    """Both signals mean a clean end; uvicorn raises the signal again after it has shut down."""
    raise SystemExit(0)


def _run(config: InferenceConfig) -> None:
    token = token_from_environment()
    from sync.follower import Follower
    from sync.serving import bind, serve, url_of, write_ready_file
    from sync.stores import open_store

    emit = emitter("inference", config.log)
    store = open_store(config.run)
    with ExitStack() as stack:
        listener = stack.enter_context(bind(config.host, config.port))
        url = url_of(listener)
        stack.callback(emit, "stopped", url=url)
        import torch

        from .app import create_app
        from .engines.torch_engine import TorchEngine

        torch.set_num_threads(config.threads)
        engine = TorchEngine(
            max_slots=config.max_slots,
            max_len=config.max_len,
            max_queued=config.max_queued,
            prefill_tokens=config.prefill_tokens,
            dtype=config.dtype,
            device=config.device,
            pause_seconds=config.pause_seconds,
        )
        stack.callback(engine.close)
        follower = Follower(store, config.folder, engine, emit=emit)
        stack.callback(follower.close)
        stop = threading.Event()
        thread = threading.Thread(target=follower.run, args=(stop, config.poll_seconds), name="follower", daemon=True)
        thread.start()
        stack.callback(thread.join, config.pause_seconds)
        stack.callback(stop.set)

        def announce() -> None:
            emit("listening", url=url, run=config.run)
            if config.ready_file is not None:
                write_ready_file(config.ready_file, url=url)

        app = create_app(
            engine,
            follower,
            token=token,
            max_body_bytes=config.max_body_bytes,
            request_seconds=config.request_seconds,
            on_start=announce,
        )
        serve(app, listener)
