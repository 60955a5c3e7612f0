"""The command line as users meet it: each mistake gives one line that names the fix, and nothing stays behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support_policy import TOKEN, served
from support_tiny import make_checkpoint, publishing

from env_space.app import create_app
from env_space.config import EnvConfig
from sync.serving import bind
from sync.stores import DirectoryStore

pytestmark = pytest.mark.integration
COMMAND = [sys.executable, "-m", "deltawire"]
LIMIT = 120
REQUIRED = {
    "inference": {"run": "bucket", "folder": "mirror"},
    "env": {},
    "train": {"run": "bucket", "env_urls": ["http://127.0.0.1:9"], "policy_url": "http://127.0.0.1:9"},
}
ROLES = pytest.mark.parametrize("role", sorted(REQUIRED))


def environ(**more: str) -> dict[str, str]:
    """The environment of a child: our token, one thread, no Hub; no setting of ours from outside."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("DELTAWIRE_")}
    fixed = {"DELTAWIRE_TOKEN": TOKEN, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "200"}
    return kept | fixed | more


def deltawire(*words: object, cwd: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    return subprocess.run(
        [*COMMAND, *map(str, words)], cwd=cwd, env=environ(**variables), capture_output=True, text=True, timeout=LIMIT
    )


def toml(folder: Path, role: str, **changes: object) -> Path:
    """A settings file with what `role` needs; None leaves a setting out."""
    values = {name: value for name, value in (REQUIRED[role] | changes).items() if value is not None}
    path = folder / f"{role}.toml"
    path.write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in values.items()))
    return path


def says(done: subprocess.CompletedProcess[str], role: str, *parts: object) -> None:
    """Status 2, nothing on standard output, and one line on standard error that holds all `parts`."""
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith(f"deltawire {role}: ")
    for part in parts:
        assert str(part) in lines[0]


# --- settings


@ROLES
def test_an_unknown_key_is_named_with_its_origin(role: str, tmp_path: Path) -> None:
    path = toml(tmp_path, role, pollseconds=3)
    says(deltawire(role, "--config", path), role, "unknown setting 'pollseconds'", f"in {path}", "known: ", "log")


@ROLES
def test_an_unknown_flag_is_refused(role: str, tmp_path: Path) -> None:
    done = deltawire(role, "--config", toml(tmp_path, role), "--pollseconds", "3")
    assert done.returncode == 2
    assert "unrecognized arguments: --pollseconds 3" in done.stderr
    assert "Traceback" not in done.stderr


@ROLES
def test_an_unknown_variable_is_refused(role: str, tmp_path: Path) -> None:
    done = deltawire(role, "--config", toml(tmp_path, role), **{f"DELTAWIRE_{role.upper()}_POLLSECONDS": "3"})
    says(done, role, "unknown setting", f"DELTAWIRE_{role.upper()}_POLLSECONDS")


@ROLES
@pytest.mark.parametrize("where", ["file", "variable", "flag"])
def test_a_wrong_type_is_named_with_its_origin(role: str, where: str, tmp_path: Path) -> None:
    path = toml(tmp_path, role, **({"log": 3} if where == "file" else {}))
    variables = {f"DELTAWIRE_{role.upper()}_LOG": "loud"} if where == "variable" else {}
    flags = ["--log", "loud"] if where == "flag" else []
    origin = {"file": f"in {path}", "variable": f"in $DELTAWIRE_{role.upper()}_LOG", "flag": "in --log"}[where]
    says(deltawire(role, "--config", path, *flags, **variables), role, "setting 'log'", origin, "'text', 'json'")


@pytest.mark.parametrize(("role", "name"), [("inference", "folder"), ("train", "policy_url"), ("train", "env_urls")])
def test_a_missing_setting_names_its_flag(role: str, name: str, tmp_path: Path) -> None:
    path = toml(tmp_path, role, **{name: None})
    says(deltawire(role, "--config", path), role, f"setting '{name}' is missing", "--" + name.replace("_", "-"))


def test_a_settings_file_that_cannot_be_read(tmp_path: Path) -> None:
    says(deltawire("env", "--config", tmp_path / "no.toml"), "env", "no such settings file", "--print-config")
    (tmp_path / "bad.toml").write_text("host = \n")
    says(deltawire("env", "--config", tmp_path / "bad.toml"), "env", "bad.toml: not a readable TOML file")


@pytest.mark.parametrize(
    ("flag", "value"),
    [("seed", 2**31), ("group-size", 1_025), ("concurrent-groups", 4_097), ("ready-groups", 65_537),
     ("max-tokens", 65_537), ("evaluation.episodes", 65_537), ("evaluation.seed", 2**31), ("temperature", 101)],
)  # fmt: skip
def test_numbers_that_no_space_accepts_are_refused_at_once(flag: str, value: int, tmp_path: Path) -> None:
    done = deltawire("train", "--config", toml(tmp_path, "train"), f"--{flag}", value)
    says(done, "train", f"setting '{flag.replace('-', '_')}' in --{flag}", "less than or equal to")


@ROLES
def test_print_config_round_trip(role: str, tmp_path: Path) -> None:
    variables = {f"DELTAWIRE_{role.upper()}_LOG": "json"}
    first = deltawire(role, "--config", toml(tmp_path, role), "--print-config", **variables)
    assert (first.returncode, first.stderr) == (0, "")
    assert 'log = "json"' in first.stdout
    again = tmp_path / "again.toml"
    again.write_text(first.stdout)
    second = deltawire(role, "--config", again, "--print-config")
    assert (second.returncode, second.stdout) == (0, first.stdout)
    flagged = deltawire(role, "--config", again, "--print-config", "--log", "none", **variables)
    assert flagged.stdout == first.stdout.replace('log = "json"', 'log = "none"'), "a flag wins over all"


@ROLES
def test_no_token_no_start(role: str, tmp_path: Path) -> None:
    path = toml(tmp_path, role)
    says(deltawire(role, "--config", path, DELTAWIRE_TOKEN=""), role, "DELTAWIRE_TOKEN is not set", "openssl rand")
    says(deltawire(role, "--config", path, DELTAWIRE_TOKEN="short"), role, "DELTAWIRE_TOKEN is too short", "16")


def test_help_and_no_command() -> None:
    done = deltawire("--help")
    assert done.returncode == 0
    assert all(name in done.stdout for name in ("demo", "inference", "env", "train"))
    assert "--env-urls" in deltawire("train", "--help").stdout
    assert deltawire().returncode == 2
    assert "invalid choice" in deltawire("trian").stderr


# --- the world outside


@pytest.mark.parametrize("role", ["inference", "env"])
def test_a_port_that_is_taken(role: str, tmp_path: Path) -> None:
    (tmp_path / "bucket").mkdir()
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        done = deltawire(role, "--config", toml(tmp_path, role), "--port", port, cwd=tmp_path)
    says(done, role, f"cannot listen on 127.0.0.1:{port}", "--port 0")


def test_a_bucket_that_is_none(tmp_path: Path) -> None:
    path = toml(tmp_path, "inference")
    says(deltawire("inference", "--config", path, cwd=tmp_path), "inference", "no such bucket folder", "trainer first")
    (tmp_path / "bucket").write_text("a file")
    for role in ("inference", "train"):
        done = deltawire(role, "--config", toml(tmp_path, role), cwd=tmp_path)
        says(done, role, f"file://{tmp_path}/bucket: cannot be used as a bucket")
    done = deltawire("inference", "--config", path, "--run", "s3://somewhere/else", cwd=tmp_path)
    says(done, "inference", "'s3://somewhere/else' is not a run URL", "file:///dir")


def test_a_folder_that_another_space_uses(tmp_path: Path) -> None:
    with served(create_app(EnvConfig(folder=tmp_path / "env", inspector=False, log="none"), TOKEN)):
        done = deltawire("env", "--folder", tmp_path / "env")
    says(done, "env", f"{tmp_path}/env: another environment Space uses this folder", "--folder")


def test_a_mirror_that_another_space_uses(tmp_path: Path) -> None:
    from sync.follower import Follower

    store = DirectoryStore(tmp_path / "bucket", create=True)
    with publishing(store, make_checkpoint(tmp_path / "model")):
        follower = Follower(store, tmp_path / "mirror", None)
        done = deltawire("inference", "--config", toml(tmp_path, "inference"), "--log", "none", cwd=tmp_path)
        follower.close()
    says(done, "inference", "mirror", "another process")


@pytest.mark.parametrize(
    ("model", "parts"),
    [("nowhere", ["./nowhere: no such model folder"]), ("empty", ["empty: no .safetensors file"]),
     ("damaged", ["damaged: cannot be loaded", "checkpoint folder"]), ("bare", ["bare: no config.json"])],
)  # fmt: skip
def test_a_model_that_cannot_be_used(model: str, parts: list[str], tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    damaged = make_checkpoint(tmp_path / "damaged")
    (damaged / "model.safetensors").write_bytes(b"no tensors here")
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "model.safetensors").write_bytes(b"")
    with served(create_app(EnvConfig(folder=tmp_path / "env", inspector=False, log="none"), TOKEN)) as url:
        path = toml(tmp_path, "train", env_urls=[url])
        done = deltawire("train", "--config", path, "--model", f"./{model}", "--log", "none", cwd=tmp_path)
    says(done, "train", *parts)


def test_an_output_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("a file")
    done = deltawire("train", "--config", toml(tmp_path, "train"), "--out", "out", cwd=tmp_path)
    says(done, "train", "out: cannot be used", "--out")
    says(deltawire("demo", "--out", tmp_path / "out"), "demo", f"{tmp_path}/out: cannot be used", "--out")


def test_a_url_that_is_none(tmp_path: Path) -> None:
    path = toml(tmp_path, "train", policy_url="http://127.0.0.1:99999")
    done = deltawire("train", "--config", path, cwd=tmp_path)
    says(done, "train", "http://127.0.0.1:99999", "is no URL")


def test_a_space_that_never_comes_up_is_named(tmp_path: Path) -> None:
    done = deltawire("train", "--config", toml(tmp_path, "train"), "--peer-seconds", "0.5", cwd=tmp_path)
    says(done, "train", "http://127.0.0.1:9: the environment Space coming up did not happen within", "did not answer")


def test_another_token_and_an_unknown_environment(tmp_path: Path) -> None:
    with served(create_app(EnvConfig(folder=tmp_path / "env", inspector=False, log="none"), TOKEN)) as url:
        path = toml(tmp_path, "train", env_urls=[url])
        done = deltawire("train", "--config", path, cwd=tmp_path, DELTAWIRE_TOKEN="another-token-of-some-length")
        says(done, "train", f"{url}/v1/status refused", "token")
        done = deltawire("train", "--config", path, "--environment", "chess", cwd=tmp_path)
        says(done, "train", "chess", "guess", "sort")


# --- the demo


def children(pid: int) -> dict[str, int]:
    """Role → pid of the demo's children."""
    found: dict[str, int] = {}
    for process in Path("/proc").iterdir():
        try:
            fields = (process / "stat").read_text().rpartition(")")[2].split()
            words = (process / "cmdline").read_bytes().split(b"\0")
        except (OSError, IndexError):
            continue
        if len(fields) > 1 and fields[1] == str(pid) and b"--config" in words:
            found[words[words.index(b"--config") - 1].decode()] = int(process.name)
    return found


@contextmanager
def demo(folder: Path, *flags: str) -> Iterator[subprocess.Popen[str]]:
    """A demo in a session of its own, so that a signal to it reaches it alone; it is ended whatever happens."""
    process = subprocess.Popen(
        [*COMMAND, "demo", "--out", str(folder), *flags],
        env=environ(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    mine: dict[str, int] = {}
    try:
        yield process
    finally:
        mine = children(process.pid)
        process.kill()
        process.communicate()
        for pid in mine.values():
            if alive(pid):
                os.kill(pid, signal.SIGKILL)


def alive(pid: int) -> bool:
    """True while a process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def until_training(process: subprocess.Popen[str], folder: Path) -> dict[str, int]:
    """Wait until the trainer works; the pids of the three children."""
    end = time.monotonic() + LIMIT
    while True:
        log = folder / "train.log"
        if log.exists() and "warm_start" in log.read_text():
            return children(process.pid)
        assert process.poll() is None
        assert time.monotonic() < end, "the trainer of the demo did not start"
        time.sleep(0.1)


def gone(pids: dict[str, int]) -> bool:
    """Wait for processes to end."""
    end = time.monotonic() + 30
    while any(map(alive, pids.values())):
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def test_a_demo_without_steps() -> None:
    says(deltawire("demo", "--steps", 0), "demo", "--steps is 0; it must be at least 1")


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_demo_leaves_nobody_behind(number: signal.Signals, status: int, tmp_path: Path) -> None:
    with demo(tmp_path / "out") as process:
        pids = until_training(process, tmp_path / "out")
        assert set(pids) == {"env", "inference", "train"}
        process.send_signal(number)
        _, errors = process.communicate(timeout=LIMIT)
        assert process.returncode == status, errors
        assert "Traceback" not in errors
        assert gone(pids)


def test_a_demo_whose_trainer_dies_says_so_and_stops_the_others(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with demo(out) as process:
        pids = until_training(process, out)
        os.kill(pids["train"], signal.SIGKILL)
        _, errors = process.communicate(timeout=LIMIT)
        assert process.returncode == 2
        assert f"deltawire demo: train ended with status -9; end of {out}/train.log:" in errors
        assert "warm_start" in errors, "the end of its log"
        assert "Traceback" not in errors
        assert gone(pids)


def test_a_demo_with_an_unknown_environment_shows_why_the_trainer_ended(tmp_path: Path) -> None:
    with demo(tmp_path / "out", "--env", "chess") as process:
        _, errors = process.communicate(timeout=LIMIT)
        assert process.returncode == 2
        assert "train ended with status 2" in errors
        assert "deltawire train: " in errors
        assert "chess" in errors
