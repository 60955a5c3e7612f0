"""The command line as users meet it: each mistake gives one line that names the fix, and nothing stays behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
from support_policy import TOKEN, served
from support_tiny import make_checkpoint

from deltawire import main
from env_space.app import create_app
from env_space.config import EnvConfig
from sync.follower import Follower
from sync.serving import bind
from sync.stores import DirectoryStore

pytestmark = pytest.mark.integration
COMMAND = [sys.executable, "-m", "deltawire"]
LIMIT = 120
Done = subprocess.CompletedProcess[str]
REQUIRED: dict[str, dict[str, object]] = {
    "inference": {"run": "bucket", "folder": "mirror"},
    "env": {},
    "train": {"run": "bucket", "env_urls": ["http://127.0.0.1:9"], "policy_url": "http://127.0.0.1:9"},
}
ROLES = pytest.mark.parametrize("role", sorted(REQUIRED))


def environ() -> dict[str, str]:
    """The environment of a child: our token, one thread, no Hub; no setting of ours from outside."""
    kept = {n: v for n, v in os.environ.items() if not n.startswith("DELTAWIRE_") or n == "DELTAWIRE_TRAIN_MODEL"}
    fixed = {"DELTAWIRE_TOKEN": TOKEN, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "200"}
    return kept | fixed


def deltawire(*words: object, cwd: Path | None = None, env: dict[str, str] | None = None) -> Done:
    """Run a command to its end."""
    variables = environ() | (env or {})
    command = [*COMMAND, *map(str, words)]
    return subprocess.run(command, cwd=cwd, env=variables, capture_output=True, text=True, timeout=LIMIT)


def toml(home: Path, role: str, /, **changes: object) -> Path:
    """A settings file with what `role` needs; None leaves a setting out."""
    values = {name: value for name, value in (REQUIRED[role] | changes).items() if value is not None}
    path = home / f"{role}.toml"
    path.write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in values.items()))
    return path


def assert_says(done: Done, role: str, *parts: object) -> None:
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
    assert_says(
        deltawire(role, "--config", path), role, "unknown setting 'pollseconds'", f"in {path}", "known: ", "log"
    )


@ROLES
def test_an_unknown_flag_is_refused(role: str, tmp_path: Path) -> None:
    done = deltawire(role, "--config", toml(tmp_path, role), "--pollseconds", "3")
    assert done.returncode == 2
    assert "unrecognized arguments: --pollseconds 3" in done.stderr
    assert "Traceback" not in done.stderr


@ROLES
def test_an_unknown_variable_is_refused(role: str, tmp_path: Path) -> None:
    done = deltawire(role, "--config", toml(tmp_path, role), env={f"DELTAWIRE_{role.upper()}_POLLSECONDS": "3"})
    assert_says(done, role, "unknown setting", f"DELTAWIRE_{role.upper()}_POLLSECONDS")


@ROLES
@pytest.mark.parametrize("where", ["file", "variable", "flag"])
def test_a_wrong_type_is_named_with_its_origin(role: str, where: str, tmp_path: Path) -> None:
    path = toml(tmp_path, role, **({"log": 3} if where == "file" else {}))
    variables = {f"DELTAWIRE_{role.upper()}_LOG": "loud"} if where == "variable" else {}
    flags = ["--log", "loud"] if where == "flag" else []
    origin = {"file": f"in {path}", "variable": f"in $DELTAWIRE_{role.upper()}_LOG", "flag": "in --log"}[where]
    assert_says(
        deltawire(role, "--config", path, *flags, env=variables), role, "setting 'log'", origin, "'text', 'json'"
    )


@pytest.mark.parametrize(("role", "name"), [("inference", "folder"), ("train", "policy_url"), ("train", "env_urls")])
def test_a_missing_setting_names_its_flag(role: str, name: str, tmp_path: Path) -> None:
    path = toml(tmp_path, role, **{name: None})
    assert_says(deltawire(role, "--config", path), role, f"setting '{name}' is missing", "--" + name.replace("_", "-"))


def test_a_settings_file_that_cannot_be_read(tmp_path: Path) -> None:
    assert_says(deltawire("env", "--config", tmp_path / "no.toml"), "env", "no such settings file", "--print-config")
    (tmp_path / "bad.toml").write_text("host = \n")
    assert_says(deltawire("env", "--config", tmp_path / "bad.toml"), "env", "bad.toml: not a readable TOML file")


@pytest.mark.parametrize(
    ("flag", "value"),
    [("seed", 2**31), ("group-size", 1_025), ("concurrent-groups", 4_097), ("ready-groups", 65_537),
     ("max-tokens", 65_537), ("evaluation.episodes", 65_537), ("evaluation.seed", 2**31), ("temperature", 101)],
)  # fmt: skip
def test_numbers_that_no_space_accepts_are_refused_at_once(flag: str, value: int, tmp_path: Path) -> None:
    done = deltawire("train", "--config", toml(tmp_path, "train"), f"--{flag}", value)
    assert_says(done, "train", f"setting '{flag.replace('-', '_')}' in --{flag}", "less than or equal to")


@ROLES
def test_print_config_of_nothing_is_a_file_to_fill_in(role: str, tmp_path: Path) -> None:
    done = deltawire(role, "--print-config", "--log", "none")
    assert done.returncode == 0, done.stderr
    required = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("# ")]
    assert required == list(REQUIRED[role])
    text = "".join(f"{name} = {json.dumps(value)}\n" for name, value in REQUIRED[role].items())
    (tmp_path / "filled.toml").write_text(text + done.stdout)
    again = deltawire(role, "--config", tmp_path / "filled.toml", "--print-config")
    assert 'log = "none"' in again.stdout
    assert "# " not in again.stdout


@ROLES
def test_print_config_round_trip(role: str, tmp_path: Path) -> None:
    variables = {f"DELTAWIRE_{role.upper()}_LOG": "json"}
    first = deltawire(role, "--config", toml(tmp_path, role), "--print-config", env=variables)
    assert (first.returncode, first.stderr) == (0, "")
    assert 'log = "json"' in first.stdout
    again = tmp_path / "again.toml"
    again.write_text(first.stdout)
    second = deltawire(role, "--config", again, "--print-config")
    assert (second.returncode, second.stdout) == (0, first.stdout)
    flagged = deltawire(role, "--config", again, "--print-config", "--log", "none", env=variables)
    assert flagged.stdout == first.stdout.replace('log = "json"', 'log = "none"'), "a flag wins over all"


@ROLES
def test_no_token_no_start(role: str, tmp_path: Path) -> None:
    path = toml(tmp_path, role)
    for token, fault in (("", "not set"), ("short", "too short")):
        done = deltawire(role, "--config", path, env={"DELTAWIRE_TOKEN": token})
        assert_says(done, role, f"DELTAWIRE_TOKEN is {fault}", "at least 16", "openssl rand")


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
    assert_says(done, role, f"cannot listen on 127.0.0.1:{port}", "--port 0")


def test_a_bucket_that_is_none(tmp_path: Path) -> None:
    path = toml(tmp_path, "inference")
    assert_says(
        deltawire("inference", "--config", path, cwd=tmp_path), "inference", "no such bucket folder", "trainer first"
    )
    (tmp_path / "bucket").write_text("a file")
    for role in ("inference", "train"):
        done = deltawire(role, "--config", toml(tmp_path, role), cwd=tmp_path)
        assert_says(done, role, f"file://{tmp_path}/bucket: cannot be used as a bucket")
    done = deltawire("inference", "--config", path, "--run", "s3://somewhere/else", cwd=tmp_path)
    assert_says(done, "inference", "'s3://somewhere/else' is not a run URL", "file:///dir")


def test_an_output_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("a file")
    done = deltawire("train", "--config", toml(tmp_path, "train"), "--out", "out", cwd=tmp_path)
    assert_says(done, "train", "out: cannot be used", "--out")
    assert_says(deltawire("demo", "--out", tmp_path / "out"), "demo", f"{tmp_path}/out: cannot be used", "--out")


@pytest.mark.parametrize("url", ["http://127.0.0.1:99999", "http://127.0.0.1:http", "ftp://host", "http://", "host:80"])
def test_a_url_that_is_none(url: str, tmp_path: Path) -> None:
    done = deltawire("train", "--config", toml(tmp_path, "train", policy_url=url), cwd=tmp_path)
    assert_says(done, "train", f"setting 'policy_url' in {tmp_path}/train.toml", f"(found {url!r})")


def test_a_folder_that_another_space_uses(tmp_path: Path) -> None:
    with space(tmp_path):
        done = deltawire("env", "--folder", tmp_path / "env")
    assert_says(done, "env", f"{tmp_path}/env: another environment Space uses this folder", "--folder")


def test_a_mirror_that_another_space_uses(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "bucket", create=True)
    follower = Follower(store, tmp_path / "mirror", None)
    done = deltawire("inference", "--config", toml(tmp_path, "inference"), "--log", "none", cwd=tmp_path)
    follower.close()
    assert_says(done, "inference", "mirror folder mirror is in use by another process", "another folder")


def test_a_model_folder_that_is_missing(tmp_path: Path) -> None:
    done = deltawire("train", "--config", toml(tmp_path, "train"), "--model", "./nowhere", cwd=tmp_path)
    assert_says(done, "train", "./nowhere: no such model folder", "--model")


class Here:
    """`deltawire` in this process, for what fails after the libraries are loaded, which takes seconds each time."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self.patch, self.capsys = folder, monkeypatch, capsys
        monkeypatch.chdir(folder)
        monkeypatch.setenv("DELTAWIRE_TOKEN", TOKEN)
        monkeypatch.setenv("TRACKIO_DIR", str(folder / "trackio"))

    def train(self, *flags: str, **changes: object) -> Done:
        """Run `deltawire train` to its end."""
        words = ["train", "--config", str(toml(self.folder, "train", **changes)), "--log", "none", *flags]
        self.capsys.readouterr()
        status = main(words)
        out, err = self.capsys.readouterr()
        return Done(words, status, out, err)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Here:
    return Here(tmp_path, monkeypatch, capsys)


def test_a_model_that_cannot_be_used(here: Here, tmp_path: Path) -> None:
    damaged = make_checkpoint(tmp_path / "damaged")
    (tmp_path / "empty").mkdir()
    assert_says(here.train("--model", "./empty"), "train", "empty: no .safetensors file")
    (damaged / "model.safetensors").write_bytes(b"no tensors here")
    assert_says(here.train("--model", "./damaged"), "train", "damaged: cannot be loaded", "a checkpoint folder")
    (damaged / "config.json").write_text("{}")
    assert_says(here.train("--model", "./damaged"), "train", "damaged: cannot be loaded", "a checkpoint folder")
    (damaged / "config.json").unlink()
    assert_says(here.train("--model", "./damaged"), "train", "damaged: no config.json", "--model")


def test_a_space_that_never_comes_up_is_named(here: Here) -> None:
    done = here.train("--peer-seconds", "0.5")
    assert_says(
        done, "train", "http://127.0.0.1:9: the environment Space coming up did not happen within", "did not answer"
    )


def test_another_token_and_an_unknown_environment(here: Here, tmp_path: Path) -> None:
    with space(tmp_path) as url:
        assert_says(here.train("--environment", "chess", env_urls=[url]), "train", "chess", "guess", "sort")
        here.patch.setenv("DELTAWIRE_TOKEN", "another-token-of-some-length")
        assert_says(here.train(env_urls=[url]), "train", f"{url}/v1/status refused", "TOKEN")


def space(folder: Path) -> AbstractContextManager[str]:
    """A real environment Space in this process; gives its URL."""
    return served(create_app(EnvConfig(folder=folder / "env", inspector=False, log="none"), TOKEN))


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


def until(process: subprocess.Popen[str], condition: Callable[[], bool]) -> dict[str, int]:
    """Wait until `condition` holds; the pids of the demo's children then."""
    end = time.monotonic() + LIMIT
    while not condition():
        assert process.poll() is None
        assert time.monotonic() < end, "the demo did not come so far"
        time.sleep(0.05)
    return children(process.pid)


def read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def gone(pids: dict[str, int]) -> bool:
    """Wait for processes to end."""
    end = time.monotonic() + 30
    while any(map(alive, pids.values())):
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def test_a_demo_without_steps() -> None:
    assert_says(deltawire("demo", "--steps", 0), "demo", "--steps is 0; it must be at least 1")


def test_an_interrupted_demo_leaves_nobody_behind(tmp_path: Path) -> None:
    with demo(tmp_path / "out") as process:
        pids = until(process, lambda: "warm_start" in read(tmp_path / "out" / "train.log"))
        assert set(pids) == {"env", "inference", "train"}
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=LIMIT)
        assert process.returncode == 130, errors
        assert "Traceback" not in errors
        assert gone(pids)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_demo_that_is_ended_while_it_starts_leaves_nobody_behind(number: signal.Signals, tmp_path: Path) -> None:
    with demo(tmp_path / "out") as process:
        pids = until(process, lambda: "inference" in children(process.pid))
        process.send_signal(number)
        _, errors = process.communicate(timeout=LIMIT)
        assert process.returncode == 128 + number, errors
        assert "Traceback" not in errors
        assert gone(pids)


def test_a_demo_whose_trainer_dies_says_why_and_stops_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    monkeypatch.setenv("DELTAWIRE_TRAIN_MODEL", str(tmp_path / "no-such-model"))
    with demo(out) as process:
        pids = until(process, lambda: "train" in children(process.pid))
        _, errors = process.communicate(timeout=LIMIT)
        assert process.returncode == 2
        assert f"deltawire demo: train ended with status 2; end of {out}/train.log:" in errors
        assert "deltawire train: " in errors, "the end of its log"
        assert "no such model folder" in errors
        assert "Traceback" not in errors
        assert gone(pids)


def test_a_demo_of_an_unknown_environment_starts_no_training(tmp_path: Path) -> None:
    done = deltawire("demo", "--env", "chess", "--out", tmp_path / "out")
    assert_says(done, "demo", "no such environment", "countdown, guess")
