"""The inspector's other tabs in Chromium: an episode by hand, two rubric versions, plots, a saved folder."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright
from test_inspector import CHROMIUM, HOSTILE, ROOT, TOKEN, _answering, made, opened, seed, shoot, space

from env_space.environments.wordle import TINY, Wordle, words
from env_space.service.store import Draw, RolloutStore
from sync.artifacts import ArtifactPublisher
from sync.schema.artifacts import Criterion, Rubric
from sync.schema.rollouts import HarnessVersions, RunRequest
from sync.stores import open_store
from sync.term import TermOptions

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium on the PATH (Debian: apt-get install chromium)"),
]


def publish(url: str) -> None:
    """Two versions of a rubric: one criterion goes, one comes, one weighs more and says something else."""
    writer = ArtifactPublisher(open_store(url, create=True, writable=True), "rubric", options=TermOptions(settle=0.0))
    writer.open()
    plain = Criterion(id="polite", text="is polite")
    first = (plain, Criterion(id="short", text=HOSTILE), Criterion(id="true", text="is true", weight=1.0))
    second = (plain, Criterion(id="kind", text="is kind"), Criterion(id="true", text="is proven", weight=2.0))
    for criteria in (first, second):
        writer.publish(Rubric(environment="guess", criteria=criteria), measured_against=None)
    writer.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        arguments = ["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"]
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, headless=True, args=arguments)
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("tabs")
    seed(place)
    bucket = (place / "bucket").as_uri()
    publish(bucket)
    store = RolloutStore(place)
    store.put_run(RunRequest(name="judged", environment="guess", policy_url="http://127.0.0.1:9", artifacts=bucket))
    harness = HarnessVersions(rubric="1@1")
    draw = Draw(0, "secret-3", harness)
    store.start_groups("judged", [draw], {})
    plain = [made(f"judged-0-{i}", "judged", "judged-0", i + 1, Random(i)) for i in range(3)]
    rewards = {"found": 1.0, "criterion.true": 0.75}
    store.add_group(
        "judged", draw, "judged-0", [r.model_copy(update={"harness": harness, "rewards": rewards}) for r in plain], {}
    )
    store.stop_run("judged")
    store.close()
    return place


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    with space(folder) as found:
        yield found


def test_an_episode_is_played_by_hand(browser: Browser, url: str) -> None:
    with opened(browser, f"{url}/?key={TOKEN}") as page:
        page.get_by_role("tab", name="Play").click()
        choose(page, "#dw-play-environment", "guess")
        page.locator("#dw-play-start").click()
        expect(page.get_by_test_id("game")).to_contain_text("your turn")
        for turn, text in enumerate(("4", "2", "1"), 1):
            page.locator("#dw-play-text textarea").fill(text)
            page.locator("#dw-play-send").click()
            expect(page.get_by_test_id("game")).to_contain_text(f"{turn} turns")
        expect(page.get_by_test_id("played")).to_have_text("reward 1 · success")
        expect(page.get_by_test_id("message")).to_have_count(7)
        shoot(page, "play")
        page.locator("#dw-play-start").click()
        expect(page.get_by_test_id("game")).to_contain_text("your turn")
        page.locator("#dw-play-text textarea").fill(HOSTILE)
        page.locator("#dw-play-send").click()
        expect(page.get_by_test_id("game")).to_contain_text(HOSTILE)
        assert page.locator("#dw-play-game img").count() == 0
        expect(page).to_have_title("Deltawire inspector")


def test_a_game_of_wordle_is_played_by_hand(browser: Browser, url: str) -> None:
    with opened(browser, f"{url}/?key={TOKEN}") as page:
        page.get_by_role("tab", name="Play").click()
        choose(page, "#dw-play-environment", "wordle")
        choose(page, "#dw-play-task", "tiny")
        page.locator("#dw-play-seed input").fill("5")
        page.locator("#dw-play-start").click()
        expect(page.get_by_test_id("game")).to_contain_text("wordle tiny: ")
        env = Wordle()
        env.reset("tiny", Random("5:instance"))  # as the Space draws it
        wrong = next(word for word in words()[:TINY] if word != env._secret)
        for turn, guess in enumerate((wrong, "zebra", env._secret), 1):
            page.locator("#dw-play-text textarea").fill(guess)
            page.locator("#dw-play-send").click()
            expect(page.get_by_test_id("game")).to_contain_text(f"{turn} turns")
        expect(page.get_by_test_id("game")).to_contain_text("unknown word")
        expect(page.get_by_test_id("game")).to_contain_text("GGGGG")
        expect(page.get_by_test_id("played")).to_have_text("reward 1 · success")
        shoot(page, "wordle")


def choose(page: Page, where: str, what: str) -> None:
    page.locator(f"{where} input").click()
    page.get_by_role("option", name=what, exact=True).click()
    expect(page.locator(f"{where} input")).to_have_value(what)


def test_two_rubric_versions_side_by_side_from_a_rollout(browser: Browser, url: str) -> None:
    with opened(browser, f"{url}/?key={TOKEN}&rollout=judged-0-1") as page:
        expect(page.locator("#dw-rollout")).to_contain_text("rubric criteria")
        page.locator('#dw-rollout a[data-step="next"]').click()
        expect(page.get_by_test_id("rollout")).to_have_attribute("data-rollout", "judged-0-2")
        page.locator("#dw-rollout").get_by_role("link", name="1@1", exact=True).click()
        pairs = page.get_by_test_id("pair")
        expect(page.get_by_test_id("difference")).to_contain_text("rubric 0@1 to 1@1")
        expect(pairs.and_(page.locator('[data-kind="changed"]'))).to_contain_text("is proven")
        expect(pairs.and_(page.locator('[data-kind="added"]'))).to_contain_text("kind")
        expect(pairs.and_(page.locator('[data-kind="removed"]'))).to_contain_text(HOSTILE)
        expect(page.get_by_test_id("channels")).to_contain_text("rubric")
        shoot(page, "channels")


def test_tasks_plots_and_queue_at_both_widths(browser: Browser, url: str) -> None:
    with opened(browser, f"{url}/?key={TOKEN}", scheme="dark") as page:
        page.get_by_role("tab", name="Tasks").click()
        expect(page.get_by_test_id("tasks-row").filter(has_text="secret-")).to_have_count(7)
        shoot(page, "tasks-dark")
        page.get_by_role("tab", name="Plots").click()
        expect(page.get_by_test_id("plot")).to_have_count(5)
        shoot(page, "plots-dark")
        page.get_by_role("tab", name="Queue").click()
        expect(page.get_by_test_id("groups-row")).to_have_count(3)
    with opened(browser, f"{url}/?key={TOKEN}&tab=plots", width=390, height=844) as page:
        page.get_by_test_id("strip").wait_for()
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        shoot(page, "phone-tabs")


def test_keys_move_open_and_explain(browser: Browser, url: str) -> None:
    with opened(browser, f"{url}/?key={TOKEN}") as page:
        expect(page.get_by_test_id("row")).to_have_count(50)
        page.locator("#dw-live input").uncheck()
        page.locator("h1").click()
        page.keyboard.press("j")
        page.keyboard.press("j")
        expect(page.get_by_test_id("row").nth(1).locator("a")).to_be_focused()
        page.keyboard.press("k")
        page.keyboard.press("Enter")
        expect(page.get_by_test_id("rollout")).to_have_attribute("data-rollout", "judged-0-2")
        page.keyboard.press("?")
        expect(page.locator("#dw-keys")).to_be_visible()
        page.keyboard.press("Escape")
        page.keyboard.press("/")
        expect(page.locator("#dw-run input")).to_be_focused()


@pytest.mark.parametrize("live", [False, True])
def test_inspect_shows_a_folder_or_a_space_and_changes_nothing(
    browser: Browser,
    tmp_path: Path,
    url: str,
    live: bool,
) -> None:
    saved = tmp_path / "saved"
    if not live:
        seed(saved)
    before = {p.name: p.read_bytes() for p in saved.glob("*")}
    ready = tmp_path / "ready.json"
    words = [sys.executable, "deltawire.py", "inspect", url if live else str(saved), "--ready-file", str(ready)]
    environment = os.environ | {"DELTAWIRE_TOKEN": TOKEN}
    with subprocess.Popen(words, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            here = _answering(process, ready)  # type: ignore[arg-type]
            assert process.stdout is not None
            address = process.stdout.readline().strip()
            assert address.startswith(f"{here}/?key=")
            assert TOKEN not in address
            assert httpx.get(here).status_code == 401
            with opened(browser, address) as page:
                expect(page.get_by_test_id("row")).to_have_count(50)
                page.get_by_test_id("row").first.click()
                expect(page.get_by_test_id("rollout")).to_be_visible()
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
    assert {p.name: p.read_bytes() for p in saved.glob("*")} == before
