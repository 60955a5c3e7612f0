"""Environments: rewards by hand, determinism, and demonstrations that are legal and as noisy as promised."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from random import Random

import pytest

from env_space.environments import ENVIRONMENTS, Environment, environment
from env_space.environments.countdown import Countdown, evaluate
from env_space.environments.guess import Guess
from env_space.environments.reverse_text import ReverseText
from env_space.environments.sort import Sort
from env_space.environments.wordle import GUESSES, TINY, Wordle, feedback, unused_hint, words
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


@pytest.mark.parametrize(
    ("answer", "reward", "success"),
    [
        (" ".join, 1.0, True),
        ("".join, 1.0, True),
        (lambda s: "z" + "".join(s[1:]), 0.375, False),
        (lambda s: "z" * len(s), 0.0, False),
        (lambda s: "".join(s[:3]), 0.0, False),
        (lambda s: "".join(s) + "a", 0.0, False),
        (lambda _: "", 0.0, False),
    ],
)
def test_reverse_text_worked_by_hand(answer: Callable[[list[str]], str], reward: float, success: bool) -> None:
    env = ReverseText()
    letters = env.reset("short", Random(5))[0].content.split()[1:]
    assert len(letters) == 4
    assert env.step(answer(letters[::-1])).done
    assert env.reward()["reward"] == pytest.approx(reward)
    assert env.success() is success


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("3*8", 24),
        (" (8-3) * 3", 15),
        ("8/3", Fraction(8, 3)),
        ("8", 8),
        ("3+3+8", 14),
        ("8*8", None),
        ("3*8+1", None),
        ("8/(3-3)", None),
        ("8**3", None),
        ("8//3", None),
        ("-3", None),
        ("(8", None),
        ("", None),
        ("3 8", None),
        ("08", None),
        ("3.0*8", None),
        ("__import__('os')", None),
        ("(" * 40 + "8" + ")" * 40, None),
    ],
)
def test_countdown_reads_expressions_of_the_given_numbers_alone(text: str, found: object) -> None:
    assert evaluate(text, [3, 3, 8]) == found


def test_countdown_worked_by_hand() -> None:
    for task, count in (("two", 2), ("three", 3)):
        for seed in range(100):
            env = Countdown()
            said = env.reset(task, Random(seed))[0].content.split()
            target, numbers = int(said[1]), [int(n) for n in said[3:]]
            assert len(numbers) == count
            assert 0 <= target <= 99
            assert env.reward()["reward"] == 0.0
            assert not env.success()
            env.step("+".join(map(str, numbers)))
            assert env.reward()["reward"] == pytest.approx(1.0 if sum(numbers) == target else 0.1)
            right = [m for n in range(9) if (m := Countdown().demonstrate(task, Random(seed + 1000 * n))[-1].content)]
            assert all(evaluate(text, [int(c) for c in text if c.isdigit()]) is not None for text in right)


@pytest.mark.parametrize(
    ("guess", "secret", "signs"),
    [
        ("crane", "crane", "GGGGG"),
        ("apple", "paper", "YYG-Y"),
        ("geese", "eagle", "YY--G"),
        ("eerie", "there", "Y-Y-G"),
        ("llama", "label", "GYY--"),
        ("ghost", "crane", "-----"),
    ],
)
def test_wordle_signs_worked_by_hand(guess: str, secret: str, signs: str) -> None:
    assert feedback(guess, secret) == signs


def test_wordle_words_are_a_list_of_its_own() -> None:
    assert len(words()) == len(set(words())) > 500
    assert all(len(word) == 5 and word.isascii() and word.islower() and word.isalpha() for word in words())


def test_wordle_worked_by_hand() -> None:
    env = Wordle()
    opening = env.reset("tiny", Random(3))[0].content
    tiny = opening.removeprefix("wordle tiny: ").split()
    assert tuple(tiny) == words()[:TINY]
    secret = env._secret
    assert secret in tiny
    wrong = next(word for word in tiny if word != secret)
    assert env.step("zebra").messages[0].content == "unknown word"
    turn = env.step(f" {wrong.upper()}\n")
    assert (turn.messages[0].content, turn.done) == (feedback(wrong, secret), False)
    assert env.reward()["reward"] == pytest.approx(0.1 * feedback(wrong, secret).count("G"))
    turn = env.step(secret)
    assert (turn.messages[0].content, turn.done) == ("GGGGG", True)
    assert env.reward()["reward"] == 1.0
    assert env.success()
    assert Wordle().reward()["reward"] == 0.0


def test_wordle_ends_after_six_guesses_or_what_is_no_word() -> None:
    env = Wordle()
    env.reset("easy", Random(0))
    turns = [env.step("zzzzz") for _ in range(GUESSES)]
    assert [turn.done for turn in turns] == [False] * 5 + [True]
    assert env.reward()["reward"] == 0.0
    for text in ("", "four", "sixsix", "cr4ne", "cräne"):
        env.reset("easy", Random(0))
        assert env.step(text).done
        assert env.reward()["reward"] == -0.2


@pytest.mark.parametrize(
    ("told", "guess", "says"),
    [
        ([("crane", "G----")], "court", ""),
        ([("crane", "G----")], "ghost", "letter 1 must be c"),
        ([("crane", "-Y---")], "ghost", "the guess must contain r"),
        ([("geese", "YY--G")], "eagle", ""),
        ([("eerie", "Y-Y-G")], "where", ""),
        ([("eerie", "Y-Y-G")], "arise", "the guess must contain e 2 times"),
    ],
)
def test_wordle_hard_mode_uses_what_was_shown(told: list[tuple[str, str]], guess: str, says: str) -> None:
    assert unused_hint(guess, told) == says
    env = Wordle()
    env.reset("hard", Random(0))
    env._told = told
    env._secret = "eagle"
    heard = env.step(guess).messages[0].content
    assert heard == (says or feedback(guess, "eagle"))


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
    with pytest.raises(InvalidRequest, match="'chess' is unknown; known: countdown, guess, reverse-text, sort, wordle"):
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
