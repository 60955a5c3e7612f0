"""`deltawire inference`: bind the port, follow the run, answer calls until SIGINT or SIGTERM."""

from __future__ import annotations

import argparse
import sys
import threading
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from sync.errors import ConfigError
from sync.events import Emit, emitter
from sync.serving import bind, serve, until_stopped, url_of, write_ready_file
from sync.settings import add_flags, load, print_config, token_from_environment

from .config import InferenceConfig

if TYPE_CHECKING:
    from .engines.base import Engine


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the settings as flags."""
    add_flags(parser, InferenceConfig)


def run(args: argparse.Namespace) -> int:
    """Run the Space with the arguments that `add_arguments` declared; returns the exit status.

    Raises DeltawireError when it cannot start: no token, no such run, port or mirror folder taken.
    """
    if args.print_config:
        sys.stdout.write(print_config(InferenceConfig, "inference", args))
        return 0
    config = load(InferenceConfig, "inference", args)
    emit = emitter("inference", config.log)
    with until_stopped():
        _run(config, emit)
    emit("stopped", run=config.run)
    return 0


def _engine(config: InferenceConfig) -> Engine:
    """The engine that the settings name, without weights yet."""
    limits: dict[str, Any] = {
        "max_slots": config.max_slots,
        "max_len": config.max_len,
        "max_queued": config.max_queued,
        "prefill_tokens": config.prefill_tokens,
        "dtype": config.dtype,
        "pause_seconds": config.pause_seconds,
        "adapter": config.channel == "adapter",
        "base": config.base,
    }
    if config.base is not None and config.channel != "adapter":
        raise ConfigError(f"base = {config.base}: only an adapter has one; set channel = adapter")
    if config.engine == "vllm":
        from .engines.vllm_core import prepare_environment

        if config.device not in ("auto", "cpu"):
            raise ConfigError(f"device = {config.device}: with engine = vllm, vLLM's build decides; leave it at auto")
        prepare_environment(threads=config.threads, kv_cache_gib=config.kv_cache_gib)
        from .engines.vllm_engine import VllmEngine

        return VllmEngine(**limits, kv_policy=config.kv_policy, tensor_parallel=config.tensor_parallel)
    import torch

    from .engines.torch_engine import TorchEngine

    torch.set_num_threads(config.threads)
    if config.tensor_parallel != 1:
        raise ConfigError(f"tensor_parallel = {config.tensor_parallel}: only vllm can; use --engine vllm")
    return TorchEngine(**limits, device=config.device)


def _run(config: InferenceConfig, emit: Emit) -> None:
    """Serve until SystemExit."""
    token = token_from_environment()
    from sync.follower import Follower
    from sync.stores import open_store

    if config.ready_file is not None and not config.ready_file.parent.is_dir():
        raise ConfigError(f"ready_file = {config.ready_file}: its folder does not exist; create it first")
    store = open_store(config.run)
    with ExitStack() as stack:
        listener = stack.enter_context(bind(config.host, config.port))
        url = url_of(listener)
        engine = _engine(config)
        stack.callback(engine.close)
        from .app import Limits, create_app
        from .gateway.sessions import SessionLimits

        follower = Follower(
            store, config.folder, engine, channel=config.channel, emit=emit, pin_ttl=config.pin_seconds or None,
            reader=config.name, at=config.at,
        )  # fmt: skip
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
            limits=Limits(
                config.max_body_bytes,
                config.request_seconds,
                config.ping_seconds,
                SessionLimits(
                    config.max_sessions, config.session_seconds, config.max_session_calls, config.max_session_tokens
                ),
            ),
            on_start=announce,
        )
        serve(app, listener, max_connections=config.max_connections, read_seconds=config.read_seconds)
