"""Environments: rewards by hand, determinism, and demonstrations that are legal and as noisy as promised."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from random import Random

import pytest

from env_space.environments import ENVIRONMENTS, Environment, environment
from env_space.environments.guess import Guess
from env_space.environments.sort import Sort
from env_space.service.sampler import cumulative_weights, draw_task, fixed_task
from sync.errors import InvalidRequest
from sync.schema.artifacts import Curriculum, CurriculumEntry

pytestmark = pytest.mark.unit


def play(env: Environment, task: str, answers: list[str]) -> tuple[list[str], bool]:
    opening = env.reset(task, Random(0))
    said = [message.content for message in opening]
    done = False
    for answer in answers:
        assert not done
        turn = env.step(answer)
        said += [message.content for message in turn.messages]
        done = turn.done
    return said, done


@pytest.mark.parametrize(
    ("secret", "answers", "said", "reward", "done"),
    [
        (4, ["4"], ["correct"], 1.0, True),
        (5, ["4", "6", "5"], ["higher", "lower", "correct"], 1.0, True),
        (3, ["4", "6", "2"], ["lower", "lower", "higher"], 0.2, True),  # 6 contradicts "lower" than 4
        (7, ["1", "1", "1"], ["higher", "higher", "higher"], 0.1, True),  # a repeat contradicts too
        (7, ["4", "5", "6"], ["higher", "higher", "higher"], 0.3, True),
        (7, [" 4\n"], ["higher"], 0.1, False),
        (7, ["4", "eight"], ["higher", "malformed"], -0.2, True),
        (7, ["8"], ["malformed"], -0.2, True),
        (7, [""], ["malformed"], -0.2, True),
        (7, ["4 5"], ["malformed"], -0.2, True),
        (7, [], [], 0.0, False),
    ],
)
def test_guess_worked_by_hand(secret: int, answers: list[str], said: list[str], reward: float, done: bool) -> None:
    env = Guess()
    heard, ended = play(env, f"secret-{secret}", answers)
    assert heard == ["guess 1-7", *said]
    assert ended is done
    assert env.reward()["reward"] == pytest.approx(reward)
    assert env.success() is (reward == 1.0)


@pytest.mark.parametrize(
    ("answer", "reward", "success"),
    [
        (" ".join, 1.0, True),
        ("".join, 1.0, True),
        (lambda s: "z" + "".join(s[1:]), 0.4, False),
        (lambda s: "z" * len(s), 0.0, False),
        (lambda s: "".join(s[:4]), 0.0, False),
        (lambda s: "".join(s) + "a", 0.0, False),
        (lambda s: "".join(s[:0]), 0.0, False),
    ],
)
def test_sort_worked_by_hand(answer: Callable[[list[str]], str], reward: float, success: bool) -> None:
    env = Sort()
    letters = env.reset("distinct", Random(5))[0].content.split()[1:]
    turn = env.step(answer(sorted(letters)))
    assert turn.done
    assert env.reward()["reward"] == pytest.approx(reward)
    assert env.success() is success


def test_sort_tasks_draw_what_they_say() -> None:
    for seed in range(200):
        distinct = Sort().reset("distinct", Random(seed))[0].content.split()[1:]
        repeats = Sort().reset("repeats", Random(seed))[0].content.split()[1:]
        assert len(distinct) == len(set(distinct)) == 5
        assert len(repeats) == 5 > len(set(repeats))


@pytest.mark.parametrize("cls", ENVIRONMENTS.values())
def test_same_task_and_seed_give_the_same_episode(cls: type[Environment]) -> None:
    for task in cls.tasks():
        assert cls().reset(task, Random("x")) == cls().reset(task, Random("x"))
        assert cls().demonstrate(task, Random("x")) == cls().demonstrate(task, Random("x"))
    with pytest.raises(ValueError, match=r"unknown .* task 'nonsense'"):
        cls().reset("nonsense", Random(0))


@pytest.mark.parametrize("cls", ENVIRONMENTS.values())
def test_demonstrations_replay_as_legal_episodes(cls: type[Environment]) -> None:
    for seed in range(50):
        for task in cls.tasks():
            talk = cls().demonstrate(task, Random(seed))
            env = cls()
            assert talk[:1] == env.reset(task, Random(seed))
            answers = [m.content for m in talk if m.role == "assistant"]
            assert talk[-1].role == "assistant"
            assert 1 <= len(answers) <= cls.max_turns
            turns = [env.step(answer) for answer in answers]
            assert [t.done for t in turns] == [False] * (len(turns) - 1) + [True]
            assert "malformed" not in [m.content for t in turns for m in t.messages]


def test_demonstrators_are_noisy_experts() -> None:
    guesses = [cls_demo(Guess, f"secret-{1 + i % 7}", i) for i in range(2_100)]
    first = Counter(talk[1] for talk in guesses)
    assert first["4"] / 2_100 == pytest.approx(0.4 + 0.6 / 7, abs=0.04)  # the middle, or replaced by chance with it
    assert set(first) == set("1234567")
    wrong = total = 0
    for i in range(1_000):
        opening, answer = cls_demo(Sort, "distinct", i)
        right = sorted(opening.split()[1:])
        wrong += sum(a != b for a, b in zip(right, answer.split(), strict=True))
        total += 5
    assert wrong / total == pytest.approx(0.3 * 15 / 16, abs=0.03)


def cls_demo(cls: type[Environment], task: str, seed: int) -> list[str]:
    return [message.content for message in cls().demonstrate(task, Random(seed))]


def test_unknown_environment_lists_the_known() -> None:
    with pytest.raises(InvalidRequest, match="'chess' is unknown; known: guess, sort"):
        environment("chess")


def test_tasks_follow_the_weights_and_the_seed() -> None:
    tasks = Guess.tasks()
    document = Curriculum(
        environment="guess",
        default_weight=0.0,
        tasks={"secret-2": CurriculumEntry(weight=1.0), "secret-5": CurriculumEntry(weight=3.0)},
    )
    weights = cumulative_weights(document, "guess", tasks)
    drawn = Counter(draw_task(tasks, 7, number, weights) for number in range(4_000))
    assert set(drawn) == {"secret-2", "secret-5"}
    assert drawn["secret-5"] / 4_000 == pytest.approx(0.75, abs=0.03)
    uniform = Counter(draw_task(tasks, 7, number, None) for number in range(7_000))
    assert min(uniform.values()) > 800
    assert [draw_task(tasks, 7, n, None) for n in range(20)] == [draw_task(tasks, 7, n, None) for n in range(20)]
    assert [draw_task(tasks, 7, n, None) for n in range(20)] != [draw_task(tasks, 8, n, None) for n in range(20)]


def test_evaluation_covers_every_task_before_any_again() -> None:
    tasks = Guess.tasks()
    fixed = [fixed_task(tasks, 3, number) for number in range(21)]
    assert all(sorted(fixed[i : i + 7]) == sorted(tasks) for i in (0, 7, 14))


def test_curricula_that_do_not_fit_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="for environment 'sort'"):
        cumulative_weights(Curriculum(environment="sort"), "guess", Guess.tasks())
    with pytest.raises(InvalidRequest, match="every task the weight 0"):
        cumulative_weights(Curriculum(environment="guess", default_weight=0.0), "guess", Guess.tasks())
