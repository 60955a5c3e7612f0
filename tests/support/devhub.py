"""The local Hub as a real process on its own folder, and clients of it as real processes with a home of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from email.message import Message
from pathlib import Path
from typing import Any, NamedTuple, Self

ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = 60.0
STOP_SECONDS = 30.0
CLIENT_SECONDS = 150.0


class Answer(NamedTuple):
    """An HTTP answer, whatever its status; header names in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        """The body as JSON."""
        return json.loads(self.body)


class HubProcess:
    """`deltawire hub serve` below `folder` (data, ready file, standard error), started on entering the context.

    It listens on a free port, which `restart` keeps. `flags` are added to the command line, `--control` unless it is
    turned off. `token` is sent by `http`, `faults` and `log`; `tokens` are what the Hub knows. Leaving the context ends
    it with SIGTERM and checks that it ended cleanly.
    """

    def __init__(
        self, folder: Path, *flags: object, token: str | None = None, tokens: str | None = None, control: bool = True
    ) -> None:
        self.folder = folder
        self.data = folder / "data"
        self.stderr = folder / "hub.stderr"
        self.token = token
        self.port = 0
        self.url = ""
        self._flags = [*(["--control"] if control else []), *map(str, flags)]
        self._tokens = tokens
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self.stop()

    @property
    def pid(self) -> int:
        """The process id of the running Hub."""
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start it and wait until it listens."""
        assert self._process is None
        ready = self.folder / "ready.json"
        ready.unlink(missing_ok=True)
        serve = [sys.executable, "-m", "deltawire", "hub", "serve", "--data", str(self.data)]
        command = [*serve, "--port", str(self.port), "--ready-file", str(ready), *self._flags]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        env.pop("DELTAWIRE_HUB_TOKENS", None)
        if self._tokens is not None:
            env["DELTAWIRE_HUB_TOKENS"] = self._tokens
        with self.stderr.open("ab") as stderr:
            self._process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.DEVNULL, stderr=stderr)
        deadline = time.monotonic() + START_SECONDS
        while not ready.exists():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise AssertionError(f"the Hub did not start: {self.stderr.read_text()}")
            time.sleep(0.02)
        self.url = json.loads(ready.read_text())["url"]
        self.port = int(self.url.rsplit(":", 1)[1])

    def kill(self) -> None:
        """End it as a power cut would end the process: SIGKILL."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """End it with SIGTERM; fails when it does not end cleanly or had an unexpected error."""
        code = self._end(signal.SIGTERM)
        said = self.stderr.read_text()
        assert code == 0, f"status {code}: {said}"
        assert "Traceback" not in said, said

    def restart(self) -> None:
        """Start again on the same port and data; ends it first when it runs."""
        if self._process is not None:
            self.stop()
        self.start()

    def _end(self, number: signal.Signals) -> int:
        process, self._process = self._process, None
        assert process is not None
        if process.poll() is None:
            process.send_signal(number)
        try:
            return process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise AssertionError("the Hub did not end in time") from None

    def http(self, method: str, path: str, body: bytes | None = None, *, token: str | None = None,
             headers: Mapping[str, str] | None = None, redirect: bool = True) -> Answer:  # fmt: skip
        """One request; `path` begins with a slash and is sent as it is. No token is sent when `token` is ''."""
        sent = dict(headers or {})
        token = self.token if token is None else token
        if token:
            sent["Authorization"] = f"Bearer {token}"
        request = urllib.request.Request(self.url + path, data=body, method=method, headers=sent)  # noqa: S310
        opener = urllib.request.build_opener(*([] if redirect else [_Stay()]))
        try:
            with opener.open(request, timeout=60) as answer:
                return Answer(answer.status, _lower(answer.headers), answer.read())
        except urllib.error.HTTPError as error:
            with error:
                return Answer(error.code, _lower(error.headers), error.read())

    def faults(self, *faults: Mapping[str, Any]) -> list[int]:
        """Put faults in force, each as in `sync.devhub.faults.Fault`; returns their numbers."""
        answer = self.http("POST", "/_faults", json.dumps(faults).encode())
        assert answer.status == 200, answer
        return list(answer.json()["ids"])

    def fault_hits(self) -> list[int]:
        """How often each fault in force was hit, in the order they were given."""
        return [fault["hits"] for fault in self.http("GET", "/_faults").json()["faults"]]

    def clear_faults(self) -> None:
        """Lift all faults."""
        assert self.http("DELETE", "/_faults").status == 200

    def log(self) -> dict[str, Any]:
        """What /_log shows."""
        return dict(self.http("GET", "/_log").json())

    def clear_log(self) -> None:
        """Forget the logged requests."""
        assert self.http("DELETE", "/_log").status == 200


def _lower(headers: Message) -> dict[str, str]:
    return {name.lower(): value for name, value in headers.items()}


class _Stay(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any, **__: Any) -> None:
        """Do not follow."""


def client_env(home: Path, url: str, token: str | None = None) -> dict[str, str]:
    """The environment of a client process: a home of its own at `home`, the Hub at `url`, short retries."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING", "DELTAWIRE_"))}
    home.mkdir(parents=True, exist_ok=True)
    fixed = {
        "HF_HOME": str(home),
        "HF_ENDPOINT": url,
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_XET_CLIENT_RETRY_MAX_ATTEMPTS": "2",
        "HF_XET_CLIENT_RETRY_BASE_DELAY": "200ms",
        "HF_TOKEN": token or "hf_anything",
        "OMP_NUM_THREADS": "1",
    }
    return kept | fixed


def run_client(env: Mapping[str, str], code: str, *args: object) -> Any:
    """Run Python `code` in a client process and return what it printed last, as JSON.

    `api` (an HfApi), `json`, `sys`, `Path` and the `args` (texts, as sys.argv[1:]) are at its hands.
    """
    done = start_client(env, code, *args)
    out, err = done.communicate(timeout=CLIENT_SECONDS)
    assert done.returncode == 0, err.decode()[-4000:]
    return json.loads(out.decode().strip().splitlines()[-1])


def start_client(env: Mapping[str, str], code: str, *args: object) -> subprocess.Popen[bytes]:
    """Like `run_client`, without waiting for it."""
    prelude = "import json, sys\nfrom pathlib import Path\nfrom huggingface_hub import HfApi\napi = HfApi()\n"
    command = [sys.executable, "-c", prelude + code, *map(str, args)]
    return subprocess.Popen(command, env=dict(env), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
