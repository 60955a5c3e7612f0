"""An inference Space in this process: engine, follower thread, server thread, client."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from inference_space.app import Limits, create_app
from inference_space.engines.torch_engine import TorchEngine
from sync import Follower, Store
from sync.schema.calls import CallResult, GenerateCall, GenerateRequest, GenerateResponse, SyncStatus
from sync.schema.sessions import Session, SessionKey
from sync.serving import bind, url_of

TOKEN = "a-token-of-sixteen-and-more"
KEY = {"Authorization": f"Bearer {TOKEN}"}


class Space:
    """One Space, serving until `stack` closes."""

    def __init__(self, stack: ExitStack, store: Store, folder: Path, **settings: Any) -> None:
        self.stack = stack
        limits = {"max_slots": 16, "max_len": 128, "max_queued": 64, "pause_seconds": 60}
        names = ("max_body_bytes", "request_seconds", "ping_seconds", "sessions")
        app_settings = {k: settings.pop(k) for k in names if k in settings}
        self.engine = TorchEngine(**(limits | settings))
        stack.callback(self.engine.close)
        self.follower = Follower(store, folder, self.engine)
        stack.callback(self.follower.close)
        stop = threading.Event()
        following = threading.Thread(target=self.follower.run, args=(stop, 60.0))
        following.start()
        stack.callback(following.join)
        stack.callback(stop.set)
        started = threading.Event()
        self.app = app = create_app(
            self.engine, self.follower, token=TOKEN, on_start=started.set, limits=Limits(**app_settings)
        )
        listener = stack.enter_context(bind("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, log_level="error", ws="none", timeout_graceful_shutdown=1))
        serving = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        serving.start()
        stack.callback(serving.join)
        stack.callback(setattr, server, "should_exit", True)
        assert started.wait(60)
        self.url = url_of(listener)
        self.http = stack.enter_context(httpx.Client(base_url=self.url, headers=KEY, timeout=60))

    def status(self) -> SyncStatus:
        """What the follower holds."""
        return SyncStatus.model_validate_json(self.http.get("/sync/status").content)

    def generate(self, *calls: GenerateCall) -> list[CallResult]:
        """POST /v1/generate."""
        answer = self.http.post("/v1/generate", content=GenerateRequest(calls=calls).model_dump_json())
        assert answer.status_code == 200, answer.text
        return list(GenerateResponse.model_validate_json(answer.content).calls)

    def open(self, **request: Any) -> SessionKey:
        """Open a capture session."""
        answer = self.http.post("/v1/sessions", json=request)
        assert answer.status_code == 200, answer.text
        return SessionKey.model_validate_json(answer.content)

    def session(self, name: str) -> Session:
        """A session's calls and chains."""
        answer = self.http.get(f"/v1/sessions/{name}")
        assert answer.status_code == 200, answer.text
        return Session.model_validate_json(answer.content)
