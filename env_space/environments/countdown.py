"""Make a target from numbers, each used at most once: one arithmetic expression as the answer."""

from __future__ import annotations

import ast
from collections import Counter
from fractions import Fraction
from random import Random
from typing import ClassVar

from sync.schema.calls import Message

from .base import Environment, Turn, assistant, user

NOISE, MOST_CHARACTERS = 0.4, 64
COUNTS = {"two": 2, "three": 3}
_OPERATORS = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}


class Countdown(Environment):
    """Reward 1 for an expression of + - * / and parentheses that gives the target; 0.1 for one that uses the given
    numbers, each at most once, and gives something else; 0 for anything else. Division is exact.
    """

    name: ClassVar[str] = "countdown"
    inline: ClassVar[bool] = True

    def __init__(self) -> None:
        self._numbers: list[int] = []
        self._target = 0
        self._expert = ""
        self._value: Fraction | None = None

    @classmethod
    def tasks(cls) -> tuple[str, ...]:
        """two, three: how many numbers are given."""
        return tuple(COUNTS)

    def reset(self, task: str, rng: Random) -> list[Message]:
        """Draw numbers of 1..9 and a target that some expression of all of them gives, from 0 to 99; raises ValueError
        for an unknown task key."""
        if task not in COUNTS:
            raise ValueError(f"unknown countdown task {task!r}; known: {', '.join(COUNTS)}")
        self._value, found = None, Fraction(-1)
        while not 0 <= found <= 99:
            self._numbers = [rng.randint(1, 9) for _ in range(COUNTS[task])]
            self._expert = _drawn(self._numbers, rng)
            value = evaluate(self._expert, self._numbers)
            assert value is not None
            found = value
        self._target = int(found)
        return [user(f"make {self._target} from {' '.join(map(str, self._numbers))}")]

    def step(self, text: str) -> Turn:
        """Take the answer; always done."""
        self._value = evaluate(text, self._numbers)
        return Turn((), done=True)

    def reward(self) -> dict[str, float]:
        """Parts: legal (0 or 0.1), exact (0 or 0.9)."""
        legal, exact = 0.1 * (self._value is not None), 0.9 * self.success()
        return {"reward": legal + exact, "legal": legal, "exact": exact}

    def success(self) -> bool:
        """True when the answer gives the target."""
        return self._value == self._target

    def demonstrate(self, task: str, rng: Random) -> list[Message]:
        """An expression that gives the target, or with probability 0.4 one with drawn operators."""
        messages = self.reset(task, rng)
        answer = _drawn(self._numbers, rng) if rng.random() < NOISE else self._expert
        return [*messages, assistant(answer)]


def evaluate(text: str, numbers: list[int]) -> Fraction | None:
    """What the expression gives; None where it is none, uses other numbers or one too often, or divides by zero."""
    text = text.strip()
    if not 0 < len(text) <= MOST_CHARACTERS or not set(text) <= set("0123456789+-*/() ") or "//" in text:
        return None
    used: Counter[int] = Counter()
    try:
        found = _value(ast.parse(text, mode="eval").body, used)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None
    return None if used - Counter(numbers) else found


def _value(node: ast.expr, used: Counter[int]) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        used[node.value] += 1
        return Fraction(node.value)
    if not isinstance(node, ast.BinOp) or type(node.op) not in _OPERATORS:
        raise ValueError(f"{type(node).__name__} is no part of an expression here")
    left, right = _value(node.left, used), _value(node.right, used)
    match _OPERATORS[type(node.op)]:
        case "+":
            return left + right
        case "-":
            return left - right
        case "*":
            return left * right
    return left / right


def _drawn(numbers: list[int], rng: Random) -> str:
    order = rng.sample(numbers, len(numbers))
    text = f"{order[0]}{rng.choice('+-*')}{order[1]}"
    return text if len(order) == 2 else f"({text}){rng.choice('+-*')}{order[2]}"
