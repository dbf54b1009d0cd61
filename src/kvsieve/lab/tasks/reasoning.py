"""Answers of one to four thousand tokens: a state that changes step by step, and questions about earlier steps."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

from kvsieve.lab.tasks.base import Generated
from kvsieve.lab.tasks.fit import Count, fit
from kvsieve.lab.tasks.haystack import passage
from kvsieve.lab.tasks.samples import QuestionAnswer, Sample, Score

_NAMES = "abcd"
# Tokens of a line such as "Step 12: a=41 b=17 c=105 d=8", if every digit is one.
_PER_LINE = 27
_LINE = re.compile(r"Step\s+(\d+)\W+a\s*=\s*(\d+)\W+b\s*=\s*(\d+)\W+c\s*=\s*(\d+)\W+d\s*=\s*(\d+)")
_END = re.compile(r"End\W+((?:\d+\W*)+)")
State = tuple[int, ...]


@dataclass(frozen=True)
class Derivation(Generated):
    """Four numbers that four rules change in turn; the answer writes every state, then some of them again.

    steps: states to write.
    """

    name: str = "reasoning"
    title: str = "Step-by-step answer of 1K tokens"
    steps: int = 40

    def build(self, rng: random.Random, index: int, length: int, count: Count) -> Sample:
        begin = tuple(rng.randrange(1, 10) for _ in _NAMES)
        rules = [(at, rng.randrange(1, 10)) for at in rng.sample(range(len(_NAMES)), len(_NAMES))]
        recalled = sorted(rng.sample(range(2, self.steps), 4))
        place = rng.random()
        said = ", ".join(f"add {amount} to {_NAMES[at]}" for at, amount in rules)
        start = " ".join(f"{name}={value}" for name, value in zip(_NAMES, begin, strict=True))
        task = (
            f"Four numbers begin as {start}. Each step changes one of them and leaves the others as they are. The "
            f"changes take turns, step after step: {said}, and so on from the first one."
        )
        ask = (
            f"Write the numbers after each of the steps 1 to {self.steps}, with a line for each such as 'Step 1: a=1 "
            "b=2 c=3 d=4'. After the last step write a line 'End: ' with the values that a had after steps "
            f"{', '.join(map(str, recalled))}."
        )
        states = worked_states(begin, rules, self.steps)
        lines = [f"Step {at}: " + _shown(state) for at, state in enumerate(states, 1)]
        end = [str(states[at - 1][0]) for at in recalled]
        turn = QuestionAnswer(
            ask,
            (", ".join(end),),
            steps_and_end(begin, rules, self.steps, recalled),
            _PER_LINE * (self.steps + 1),
            prefix="Step 1:",
            golden="\n".join([*lines, f"End: {', '.join(end)}"]).removeprefix("Step 1:").strip(),
            spread=True,
        )

        def make(words: int) -> Sample:
            return Sample(f"{''.join(passage(self.text, place, words)).strip()}\n\n{task}".strip(), (turn,))

        return fit(make, count, length, self.name)[0]


def _shown(state: State) -> str:
    return " ".join(f"{name}={value}" for name, value in zip(_NAMES, state, strict=True))


def after_rule(state: State, rule: tuple[int, int]) -> State:
    return tuple(value + rule[1] * (at == rule[0]) for at, value in enumerate(state))


def worked_states(begin: State, rules: Sequence[tuple[int, int]], steps: int) -> list[State]:
    """Return the states after each step; rules: (index of a number, amount added), in turn."""
    states = [begin]
    for step in range(steps):
        states.append(after_rule(states[-1], rules[step % len(rules)]))
    return states[1:]


def steps_and_end(begin: State, rules: Sequence[tuple[int, int]], steps: int, recalled: Sequence[int]) -> Score:
    """Score lines "Step 3: a=1 b=2 c=3 d=4" and the last line.

    "steps" is the share of steps with a right line: the rule of its turn, applied to the line before as the answer has
    it. "end" is the share of values in the last line that are those of the recalled steps. The score is their mean.
    """
    truth = worked_states(begin, rules, steps)
    wanted = [truth[at - 1][0] for at in recalled]

    def score(answer: str, expected: tuple[str, ...]) -> dict[str, float]:
        # The prompt gave the model the start of the first line.
        text = answer if answer.lstrip().startswith("Step") else f"Step 1: {answer}"
        found: dict[int, State] = {}
        for at, *values in _LINE.findall(text):
            found.setdefault(int(at), tuple(map(int, values)))
        right = 0
        before: State | None = begin
        for at in range(1, steps + 1):
            state = found.get(at)
            rule = rules[(at - 1) % len(rules)]
            right += state is not None and before is not None and state == after_rule(before, rule)
            before = state
        ends = _END.findall(text)
        values = re.findall(r"\d+", ends[-1]) if ends else []
        hits = sum(int(value) == right_one for value, right_one in zip(values, wanted, strict=False))
        share = right / steps
        return {"score": (share + hits / len(wanted)) / 2, "steps": share, "end": hits / len(wanted)}

    return score
