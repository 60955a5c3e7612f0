"""The inspector in Chromium, served by a real environment Space over a seeded database."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from random import Random
from typing import Any, Literal

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from env_space.service.store import Draw, RolloutStore
from sync.schema.calls import CallResult, GenerateRequest, GenerateResponse, Message, VersionSpan
from sync.schema.rollouts import Chain, HarnessVersions, Rollout, RolloutStatus, RunRequest

CHROMIUM = shutil.which("chromium")
ROOT = Path(__file__).parents[2]
SHOTS = ROOT / "tests" / "artifacts"
TOKEN = "inspector-test-token"
HOSTILE = "<img src=x onerror='document.title=\"owned\"'>{{value}} ${1+1} <b>bold</b>"
GROUPS, SIZE, CHECKS = 24, 8, 16
Scheme = Literal["light", "dark"]
STATUSES: tuple[RolloutStatus, ...] = ("done", "done", "done", "truncated", "done", "timeout", "done", "env_error")

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium on the PATH (Debian: apt-get install chromium)"),
]


def made(name: str, run: str, group: str, index: int, rng: Random) -> Rollout:
    """A rollout of one to three turns; the last of a group failed, the first talks in hostile text and forks."""
    status = STATUSES[index % len(STATUSES)]
    version = int(group.rpartition("-")[2]) // 6
    ids: list[int] = []
    mask: list[int] = []
    spans: list[VersionSpan] = []
    talk = [Message(role="user", content="guess 1-7")]
    turns = 1 + index % 3
    for turn in range(turns):
        fresh, sampled = rng.randint(4, 9), rng.randint(2, 6)
        ids += [rng.randrange(300) for _ in range(fresh + sampled)]
        mask += [0] * fresh + [1] * sampled
        spans.append(VersionSpan(version=f"{version + turn // 2}@1", start=len(ids) - sampled, end=len(ids)))
        guess = HOSTILE if index == 0 else str(rng.randint(1, 7))
        talk += [Message(role="assistant", content=guess), Message(role="user", content="higher")]
    logprobs = tuple(-abs(rng.gauss(0, 1.5)) if trained else 0.0 for trained in mask)
    chain = Chain.model_validate({"ids": ids, "mask": mask, "logprobs": logprobs, "weight_versions": spans})
    fork = Chain(
        ids=(*chain.ids[:3], 301, 302),
        mask=(0, 0, 0, 0, 1),
        logprobs=(0.0, 0.0, 0.0, 0.0, -0.5),
        weight_versions=(VersionSpan(version=f"{version}@1", start=4, end=5),),
    )
    failed = status == "env_error"
    return Rollout(
        id=name,
        run=run,
        group=group,
        index=index,
        task=f"secret-{rng.randint(1, 7)}",
        environment="guess",
        status=status,
        reward=None if failed else (1.0 if index == 2 else 0.1 * turns),
        rewards={} if failed else {"found": float(index == 2), "consistent": 0.1 * turns},
        success=None if failed else index == 2,
        chains=(chain, fork) if index == 0 else (chain,),
        messages=tuple(talk),
        findings=("top-p was dropped: a train session samples freely",) if index == 0 else (),
        harness=HarnessVersions(curriculum="4@1"),
        version_min=f"{version}@1",
        version_max=f"{version + (turns - 1) // 2}@1",
        seconds={"init": 0.001, "ready": 0.2, "run": 1.25, "post": 0.002, "score": 0.001},
        created_at=time.time() - 10 * (GROUPS - version) - index,
    )


def seed(folder: Path) -> None:
    """Two stopped runs: `train` with GROUPS groups of SIZE, then `check` with CHECKS groups of one."""
    rng = Random(7)
    store = RolloutStore(folder)
    for run, groups, size in (("train", GROUPS, SIZE), ("check", CHECKS, 1)):
        request = RunRequest(name=run, environment="guess", policy_url="http://127.0.0.1:9", group_size=size)
        store.put_run(request)
        counters = {"started": groups, "rollouts": groups * size}
        draws = [Draw(at, "secret-3", HarnessVersions(curriculum="4@1")) for at in range(groups)]
        store.start_groups(run, draws, counters)
        for draw in draws:
            group = f"{run}-{draw.seq}"
            rollouts = [made(f"{group}-{i}", run, group, i + (size == 1), rng) for i in range(size)]
            store.add_group(run, draw, group, rollouts, counters)
        store.stop_run(run)
    store.close()
    with sqlite3.connect(folder / "rollouts.sqlite") as database:
        database.execute("UPDATE rollouts SET body = '{}' WHERE id = 'train-1-1'")
    database.close()


@contextmanager
def space(folder: Path) -> Iterator[str]:
    """A real environment Space on `folder`, ended by SIGTERM; gives its url."""
    ready = folder / "ready.json"
    start = (
        "import argparse, sys; from env_space import cli; p = argparse.ArgumentParser(); cli.add_arguments(p); "
        "sys.exit(cli.run(p.parse_args()))"
    )
    flags = ["--folder", str(folder), "--ready-file", str(ready), "--log", "none"]
    environment = os.environ | {"DELTAWIRE_TOKEN": TOKEN, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen([sys.executable, "-c", start, *flags], cwd=ROOT, env=environment) as process:
        try:
            yield _answering(process, ready)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(20)


def _answering(process: subprocess.Popen[bytes], ready: Path) -> str:
    ends = time.monotonic() + 60
    while time.monotonic() < ends and process.poll() is None:
        if ready.exists():
            url = str(json.loads(ready.read_text())["url"])
            with httpx.Client(timeout=60) as client:
                assert client.get(f"{url}/health").status_code == 200
            return url
        time.sleep(0.1)
    raise AssertionError(f"the environment Space wrote no {ready} in 60 s (exit code {process.poll()})")


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("seeded")
    seed(folder)
    with space(folder) as found:
        yield found


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        arguments = ["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"]
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, headless=True, args=arguments)
        yield chromium
        chromium.close()


@contextmanager
def opened(
    browser: Browser, address: str, *, width: int = 1440, height: int = 950, scheme: Scheme = "light"
) -> Iterator[Page]:
    """A page in a fresh context; no console error, failed request or request to another host is forgiven."""
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
    page = context.new_page()
    page.set_default_timeout(30_000)
    expect.set_options(timeout=30_000)
    wrong: list[str] = []
    home = re.compile(r"http://127\.0\.0\.1:\d+/|http://elsewhere\.test/|data:|blob:")
    page.on("console", lambda m: wrong.append(m.text) if m.type == "error" else None)
    page.on("pageerror", lambda e: wrong.append(str(e)))
    page.on("request", lambda r: None if home.match(r.url) else wrong.append(f"outside: {r.url}"))
    page.goto(address)
    yield page
    context.close()
    assert wrong == []


def shoot(page: Page, name: str) -> None:
    SHOTS.mkdir(exist_ok=True)
    page.screenshot(path=SHOTS / f"inspector-{name}.png")


def test_list_pages_and_filters(browser: Browser, url: str) -> None:
    with opened(browser, f"{url}/?key={TOKEN}") as page:
        rows, where = page.get_by_test_id("row"), page.get_by_test_id("where")
        total = GROUPS * SIZE + CHECKS
        expect(where).to_have_text(f"1–50 of {total}")
        expect(rows).to_have_count(50)
        expect(rows.first).to_have_attribute("data-rollout", f"check-{CHECKS - 1}-0")
        expect(page.get_by_test_id("run")).to_have_count(2)
        expect(page.get_by_test_id("strip")).to_contain_text(f"restored{total}")
        expect(page.locator("#dw-newer")).to_be_disabled()
        shoot(page, "list-light")
        page.get_by_role("button", name="Older", exact=True).click()
        expect(where).to_have_text(f"51–100 of {total}")
        for end in (150, 200, total):
            page.get_by_role("button", name="Older", exact=True).click()
            expect(where).to_have_text(f"{(end - 1) // 50 * 50 + 1}–{end} of {total}")
        expect(page.locator("#dw-older")).to_be_disabled()
        expect(rows.last).to_have_attribute("data-rollout", "train-0-0")
        page.get_by_role("button", name="Newer", exact=True).click()
        expect(where).to_have_text(f"151–200 of {total}")

        page.locator("#dw-status input").click()
        page.get_by_role("option", name="env_error", exact=True).click()
        expect(where).to_have_text(f"1–{GROUPS} of {GROUPS}")
        assert rows.locator(".dwc-reward").all_inner_texts() == ["none"] * GROUPS
        page.locator("#dw-run input").click()
        page.get_by_role("option", name="check", exact=True).click()
        expect(page.locator("#dw-list")).to_contain_text("No rollouts here")
        page.locator("#dw-status input").click()
        page.get_by_role("option", name="any status", exact=True).click()
        expect(rows).to_have_count(CHECKS)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_rollout_turn_by_turn(browser: Browser, url: str, scheme: Scheme) -> None:
    with opened(browser, f"{url}/?key={TOKEN}", scheme=scheme) as page:
        expect(page.locator("#dw-rollout")).to_contain_text("No rollout chosen")
        page.locator("#dw-run input").click()
        page.get_by_role("option", name="train", exact=True).click()
        expect(page.get_by_test_id("where")).to_have_text(f"1–50 of {GROUPS * SIZE}")
        name = f"train-{GROUPS - 1}-5"
        page.locator(f'tr[data-rollout="{name}"]').click()
        expect(page.get_by_test_id("rollout")).to_have_attribute("data-rollout", name)
        assert page.url == f"{url}/?rollout={name}"
        expect(page.get_by_test_id("message")).to_have_count(7)
        expect(page.get_by_test_id("message").nth(5)).to_contain_text("assistant · turn 3")
        expect(page.get_by_test_id("reward")).to_have_text("reward 0.3 ✗")
        for part in ("timeout", "curriculum", "4@1", "3@1 – 4@1", "1.25 s", "trained"):
            expect(page.get_by_test_id("rollout")).to_contain_text(part)
        tokens, legend = page.get_by_test_id("tokens"), page.get_by_test_id("legend")
        expect(legend).to_have_text("contexttrained")
        cells = tokens.locator(".dw-chain .dw-t")
        marks = [text or "" for text in cells.evaluate_all("cells => cells.map(cell => cell.title)")]
        assert all(re.match(r"position \d+ · id \d+ · (context$|logprob -.* · version \d@1$)", m) for m in marks)
        trained = sum("logprob" in mark for mark in marks)
        expect(tokens.locator(".dw-chain .dw-m")).to_have_count(trained)
        colour = page.locator("#dw-colour")
        colour.get_by_label("logprob").check()
        expect(tokens).to_have_attribute("data-colouring", "logprob")
        expect(legend).to_contain_text("p < 0.01")
        colour.get_by_label("weight version").check()
        expect(tokens).to_have_attribute("data-colouring", "version")
        expect(legend).to_have_text("context3@14@1")
        expect(tokens.locator(".dw-chain .dw-v0, .dw-chain .dw-v1")).to_have_count(trained)
        marked = page.locator(f'tr[aria-current][data-rollout="{name}"]')
        expect(marked).to_have_count(1)
        shoot(page, f"rollout-{scheme}")


def test_deep_link_shows_hostile_text_as_text_and_forks(browser: Browser, url: str) -> None:
    with opened(browser, f"{url}/?rollout=train-3-0&key={TOKEN}") as page:
        said = page.get_by_test_id("message").nth(1)
        expect(said.locator("div")).to_have_text(HOSTILE)
        assert page.locator("#dw-rollout img, #dw-rollout b b").count() == 0
        expect(page).to_have_title("Deltawire inspector")
        assert page.url == f"{url}/?rollout=train-3-0"
        expect(page.get_by_test_id("chain")).to_have_count(2)
        expect(page.get_by_test_id("tokens")).to_contain_text("forks from chain 1 at position 3")
        expect(page.get_by_test_id("findings")).to_contain_text("top-p was dropped")


@pytest.mark.parametrize(
    ("name", "title", "text"),
    [
        ("train-999-0", "There is no rollout train-999-0", "answered 404"),
        ("%3Cb%3E..%2F", "There is no rollout <b>../", "cannot be a rollout id"),
        ("train-1-1", "The rollout cannot be read", "something else than a Rollout"),
        ("recent", "The rollout cannot be read", "something else than a Rollout"),
    ],
)
def test_what_cannot_be_shown_is_said_clearly(browser: Browser, url: str, name: str, title: str, text: str) -> None:
    with opened(browser, f"{url}/?rollout={name}&key={TOKEN}") as page:
        alert = page.locator("#dw-rollout").get_by_role("alert")
        expect(alert).to_contain_text(title)
        expect(alert).to_contain_text(text)
        expect(page.get_by_test_id("row")).to_have_count(50)
        assert "Traceback" not in page.content()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_phone_width(browser: Browser, url: str, scheme: Scheme) -> None:
    with opened(browser, f"{url}/?key={TOKEN}", width=390, height=844, scheme=scheme) as page:
        expect(page.get_by_test_id("row")).to_have_count(50)
        shoot(page, f"phone-list-{scheme}")
        page.get_by_test_id("row").nth(2).click()
        expect(page.get_by_test_id("tokens")).to_be_visible()
        detail = "document.getElementById('dw-detail').getBoundingClientRect().top"
        page.wait_for_function(f"Math.abs({detail}) < 20 || scrollY + innerHeight >= document.body.scrollHeight - 2")
        expect(page.get_by_test_id("reward")).to_be_in_viewport()
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        shoot(page, f"phone-rollout-{scheme}")


def test_the_token_stands_before_the_page_and_a_link_from_elsewhere_works(browser: Browser, url: str) -> None:
    with httpx.Client(base_url=url) as client:
        for path in ("/", "/config", "/gradio_api/info", "/v1/status", "/?key=wrong"):
            assert client.get(path).status_code == 401, path
        own = {"authorization": f"Bearer {TOKEN}"}
        assert client.get("/v1/rollouts/recent", headers=own).json()["total"] == GROUPS * SIZE + CHECKS
        unknown = client.get("/v1/nothing", headers=own)
        assert unknown.status_code == 404
        assert "/v1/nothing" in unknown.json()["error"]["message"]
        assert TOKEN not in client.get("/", headers=own).text
    with opened(browser, "about:blank") as page:
        link = f'<a href="{url}/?key={TOKEN}&rollout=train-2-2">open</a>'
        page.route("http://elsewhere.test/", lambda route: route.fulfill(body=link, content_type="text/html"))
        page.goto("http://elsewhere.test/")
        page.get_by_role("link", name="open").click()
        expect(page.get_by_test_id("rollout")).to_have_attribute("data-rollout", "train-2-2")


class Policy(BaseHTTPRequestHandler):
    """Answers every call of /v1/generate with the guess 4: two ids, one version."""

    def do_POST(self) -> None:
        body = GenerateRequest.model_validate_json(self.rfile.read(int(self.headers["content-length"])))
        results = [
            CallResult(
                id=call.id,
                prompt_ids=(*call.prefix_ids, *(10 + len(m.content) for m in call.messages)),
                output_ids=(4, 1),
                logprobs=(-0.7, -0.1),
                weight_versions=(VersionSpan(version="2@1", start=0, end=2),),
                finish_reason="stop",
                text="4",
            )
            for call in body.calls
        ]
        answer = GenerateResponse(calls=tuple(results)).model_dump_json().encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
        """Be quiet."""


@pytest.fixture
def policy() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Policy)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_an_empty_service_says_what_to_do_and_fills_by_itself(browser: Browser, tmp_path: Path, policy: str) -> None:
    with space(tmp_path) as fresh, opened(browser, f"{fresh}/?key={TOKEN}") as page:
        expect(page.get_by_test_id("strip")).to_contain_text("POST /v1/runs")
        expect(page.locator("#dw-list")).to_contain_text("No rollouts here")
        shoot(page, "empty")
        run = RunRequest(
            name="live", environment="guess", policy_url=policy, purpose="evaluation", tasks=3, group_size=2
        )
        with httpx.Client(base_url=fresh, headers={"authorization": f"Bearer {TOKEN}"}) as client:
            assert client.post("/v1/runs", json=run.model_dump(mode="json")).status_code == 200
        expect(page.get_by_test_id("row")).to_have_count(6)
        expect(page.get_by_test_id("run")).to_contain_text("complete")
        page.locator("#dw-run input").click()
        page.get_by_role("option", name="live", exact=True).click()
        page.get_by_test_id("row").first.click()
        expect(page.get_by_test_id("message").nth(1)).to_contain_text("4")
        expect(page.get_by_test_id("legend")).to_have_text("contexttrained")
