"""How quick the inspector's routes and page are over many stored rollouts: `python -m benchmarks.inspector`.

Serves a saved folder as `deltawire inspect` does. `--chromium` adds the first paint of the list and opening a rollout,
each in a fresh browser context. Prints one JSON document; seconds, medians and the worst of `--repeats`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

import httpx

from env_space.service.store import Draw, RolloutStore
from sync.schema.calls import Message, VersionSpan
from sync.schema.rollouts import Chain, HarnessVersions, Rollout, RunRequest

GROUP = 8
TOKENS = 400


def fill(folder: Path, count: int) -> None:
    """Store `count` rollouts of TOKENS tokens, in groups of GROUP."""
    rng, store = Random(3), RolloutStore(folder)
    store.put_run(RunRequest(name="many", environment="guess", policy_url="http://127.0.0.1:9"))
    for seq in range(count // GROUP):
        draw = Draw(seq, f"secret-{seq % 50}", HarnessVersions(rubric="1@1"))
        store.start_groups("many", [draw], {})
        store.add_group("many", draw, f"g-{seq}", [_one(seq, i, draw, rng) for i in range(GROUP)], {})
    store.close()


def _one(seq: int, index: int, draw: Draw, rng: Random) -> Rollout:
    version = f"{seq // 20}@1"
    half = TOKENS // 2
    chain = Chain(
        ids=tuple(rng.randrange(50_000) for _ in range(TOKENS)),
        mask=(0,) * half + (1,) * half,
        logprobs=(0.0,) * half + tuple(-rng.random() for _ in range(half)),
        weight_versions=(VersionSpan(version=version, start=half, end=TOKENS),),
    )
    talk = tuple(Message(role=r, content="word " * 80) for r in ("user", "assistant"))
    return Rollout(
        id=f"g-{seq}-{index}", run="many", group=f"g-{seq}", index=index, task=draw.task, environment="guess",
        status="done", reward=rng.random(), success=rng.random() > 0.5, chains=(chain,), messages=talk,
        harness=draw.harness, version_min=version, version_max=version, seconds={"run": rng.random()},
        created_at=1e9 + seq,
    )  # fmt: skip


def timed(call: Callable[[], object], repeats: int) -> dict[str, float]:
    """Median and worst seconds of `call`."""
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return {"median": round(statistics.median(taken), 4), "worst": round(max(taken), 4)}


def browse(address: str, key: str, chromium: str, repeats: int) -> dict[str, dict[str, float]]:
    """First paint of the list, and opening one rollout by its link, in Chromium."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        flags = ["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"]
        browser = playwright.chromium.launch(executable_path=chromium, headless=True, args=flags)

        def paint() -> None:
            context = browser.new_context()
            page = context.new_page()
            page.goto(f"{address}/?key={key}")
            page.get_by_test_id("row").nth(49).wait_for()
            context.close()

        first = timed(paint, repeats)
        page = browser.new_page()
        page.goto(f"{address}/?key={key}")
        at = iter(range(repeats))
        page.get_by_test_id("row").nth(49).wait_for()

        def choose() -> None:
            row = page.get_by_test_id("row").nth(next(at))
            name = row.get_attribute("data-rollout")
            row.click()
            page.locator(f'[data-testid="rollout"][data-rollout="{name}"]').wait_for()

        opened = timed(choose, repeats)
        browser.close()
    return {"first_paint": first, "open_rollout": opened}


def main() -> int:
    """Fill, serve, ask, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rollouts", type=int, default=10_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--chromium", default="", help="its path; empty: routes alone")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "space"
        fill(folder, args.rollouts)
        words = [sys.executable, "deltawire.py", "inspect", str(folder)]
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
            try:
                result = measure(process, args)
            finally:
                process.terminate()
    print(json.dumps(result, indent=2))
    return 0


def measure(process: subprocess.Popen[str], args: argparse.Namespace) -> dict[str, object]:
    """Wait for the page, then time its routes and, where asked, the page itself."""
    assert process.stdout is not None
    url, _, key = process.stdout.readline().strip().partition("/?key=")
    if not key:
        raise SystemExit("deltawire inspect did not start; run it by hand to see why")
    while True:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(url, timeout=60).status_code == 401:
                break
        time.sleep(0.05)
    result: dict[str, object] = {"rollouts": args.rollouts}
    headers = {"authorization": f"Bearer {key}"}
    with httpx.Client(base_url=url, headers=headers, timeout=60, trust_env=False) as client:
        for path in ("/v1/rollouts/recent", "/v1/rollouts/g-0-0", "/v1/summary", "/v1/series", "/v1/group?name=g-0"):
            result[path] = timed(lambda path=path: client.get(path).raise_for_status(), args.repeats)  # type: ignore[misc]
    if args.chromium:
        result |= browse(url, key, args.chromium, args.repeats)
    return result


if __name__ == "__main__":
    sys.exit(main())
