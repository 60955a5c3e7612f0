"""A scripted policy for tests: answers POST /v1/generate like an inference Space, with bytes for tokens.

It plays guess by binary search and sort by sorting, under the weights version 3@1. POST /control switches `mode`:
ok, 500, 429, hang, hang_later (with a prefix only), garbage, engine_error (every call fails), odd_error (every other
episode fails once), small (at most two calls), too_long (calls with a prefix are refused), refuse (every call),
endless (no end token), rude (malformed answers).
Run it as a process with `python tests/support_policy.py READY_FILE [PORT]`.
"""

from __future__ import annotations

import asyncio
import re
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response
from pydantic_core import from_json, to_json

from sync.asgi import App
from sync.serving import bind, serve, url_of, write_ready_file

ROLES = {"user": 256, "assistant": 257, "system": 259, "tool": 260}
END = 258
VERSION = "3@1"


def make_policy(token: str) -> FastAPI:
    """The app. `app.state.mode` is the mode, `app.state.requests` the sizes of the batches seen."""
    app = FastAPI()
    app.state.mode, app.state.requests, app.state.failed = "ok", [], set()

    async def generate(request: Request) -> Response:
        body = await request.body()
        mode = app.state.mode
        if request.headers.get("authorization") != f"Bearer {token}":
            return Response(status_code=401)
        if mode in ("500", "429"):
            return Response(b'{"error":{"code":"down","message":"told to"}}', int(mode))
        if mode == "hang" or (mode == "hang_later" and any(c.get("prefix_ids") for c in from_json(body)["calls"])):
            await asyncio.sleep(3_600)
        if mode == "garbage":
            return Response(b"<html>")
        calls = from_json(body)["calls"]
        if mode == "small" and len(calls) > 2:
            return Response(b'{"error":{"code":"body_too_large","message":"told to"}}', 413)
        app.state.requests.append(len(calls))
        results = [_answer(call, mode, app.state.failed) for call in calls]
        return Response(to_json({"calls": results}), media_type="application/json")

    async def control(request: Request) -> dict[str, str]:
        app.state.mode = (await request.json())["mode"]
        return {"mode": app.state.mode}

    app.add_api_route("/v1/generate", generate, methods=["POST"])
    app.add_api_route("/control", control, methods=["POST"])
    return app


def _answer(call: dict[str, Any], mode: str, failed: set[str]) -> dict[str, Any]:
    prompt = list(call.get("prefix_ids", ()))
    if mode == "engine_error" or (mode == "odd_error" and _once(call["id"], failed)):
        return {"id": call["id"], "error": {"code": "engine_failed", "message": "told to"}}
    if mode == "too_long" and prompt:
        return {"id": call["id"], "error": {"code": "prompt_too_long", "message": "told to"}}
    if mode == "refuse":
        return {"id": call["id"], "error": {"code": "no_chat_template", "message": "told to"}}
    for message in call.get("messages", ()):
        prompt += [ROLES[message["role"]], *message["content"].encode(), END]
    prompt.append(ROLES["assistant"])
    text = "hello" if mode == "rude" else _play(prompt)
    output = list(text.encode()) if mode == "endless" else [*text.encode(), END]
    return {
        "id": call["id"],
        "prompt_ids": prompt,
        "output_ids": output,
        "logprobs": [-0.5] * len(output),
        "weight_versions": [{"version": VERSION, "start": 0, "end": len(output)}],
        "finish_reason": "length" if mode == "endless" else "stop",
        "text": text,
    }


def _once(name: str, failed: set[str]) -> bool:
    episode, index = name.rpartition(".")[0], int(name.split(".")[-2])
    if index % 2 or episode in failed:
        return False
    failed.add(episode)
    return True


def _play(prompt: list[int]) -> str:
    text = "".join(chr(i) if i < 256 else " " for i in prompt)
    if (sort := re.search(r"sort ([a-p ]+)", text)) is not None:
        return " ".join(sorted(sort[1].split()))
    low, high = 1, 7
    for guess, said in re.findall(r"([1-7]) +(higher|lower)", text.partition("guess 1-7")[2]):
        low, high = (int(guess) + 1, high) if said == "higher" else (low, int(guess) - 1)
    return str((low + high) // 2)


@contextmanager
def served(app: App, port: int = 0) -> Iterator[str]:
    """Serve an app in a thread of this process; yields its URL."""
    import uvicorn

    with bind("127.0.0.1", port) as listener:
        config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=1, ws="none")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            until = time.monotonic() + 30
            while not server.started:
                if not thread.is_alive() or time.monotonic() > until:
                    raise RuntimeError("the app did not start within 30 s")
                time.sleep(0.01)
            yield url_of(listener)
        finally:
            server.should_exit = True
            thread.join()


def main(ready_file: str, port: str = "0") -> None:
    """Serve until terminated; the token is the tests' fixed one."""
    with bind("127.0.0.1", int(port)) as listener:
        write_ready_file(Path(ready_file), url=url_of(listener))
        serve(make_policy(TOKEN), listener)


TOKEN = "0123456789abcdef0123456789abcdef"

if __name__ == "__main__":
    main(*sys.argv[1:])
