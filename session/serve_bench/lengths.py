"""How long prompts and answers are: one length, a distribution, or the lines of a file."""

import json
import math
import random
from dataclasses import dataclass
from pathlib import Path

from pshard.errors import UserError, name_cause

FORMS = "512 (each), 64-1024 (any between, alike often), lognormal:512:0.8 (median and sigma) or lognormal:512:0.8:4096"


@dataclass(frozen=True)
class Lengths:
    """Tokens. kind: "fixed" (low), "uniform" (low to high) or "lognormal" (median low, sigma, at most high)."""

    kind: str
    low: int
    high: int = 0
    sigma: float = 0.0

    def __str__(self) -> str:
        if self.kind == "fixed":
            return str(self.low)
        if self.kind == "uniform":
            return f"{self.low}-{self.high}"
        return f"lognormal:{self.low}:{self.sigma:g}:{self.high}"

    def draw(self, rng: random.Random) -> int:
        """One length, 1 or more."""
        if self.kind == "fixed":
            return self.low
        if self.kind == "uniform":
            return rng.randint(self.low, self.high)
        return min(self.high, max(1, round(self.low * math.exp(rng.gauss(0.0, self.sigma)))))


def parse_lengths(text: str) -> Lengths:
    """What FORMS lists. Raises ValueError."""
    kind, *numbers = text.split(":")
    try:
        if kind == "lognormal" and len(numbers) in (2, 3):
            median, sigma = int(numbers[0]), float(numbers[1])
            most = int(numbers[2]) if len(numbers) == 3 else 16 * median
            if 1 <= median <= most and 0 <= sigma < 10:
                return Lengths("lognormal", median, most, sigma)
        elif not numbers and "-" in kind:
            low, high = map(int, kind.split("-"))
            if 1 <= low <= high:
                return Lengths("uniform", low, high)
        elif not numbers and int(kind) >= 1:
            return Lengths("fixed", int(kind))
    except ValueError:
        pass
    raise ValueError(f"{text!r} is no length: {FORMS}")


@dataclass(frozen=True)
class Wanted:
    """A request before it is written: a prompt of so many tokens, or one that is given as text, and how many tokens
    its answer is to have."""

    prompt: int | str
    answer: int


def read_lengths(path: Path) -> list[Wanted]:
    """Lines such as {"prompt": 512, "answer": 128}, or with a text as prompt. Raises UserError that names the line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {name_cause(error)}; give a text file") from None
    found = [_read_line(path, i, line) for i, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise UserError(f'{path} has no lines; give some, each like {{"prompt": 512, "answer": 128}}')
    return found


def _read_line(path: Path, number: int, line: str) -> Wanted:
    try:
        data = json.loads(line)
        prompt, answer = data["prompt"], data["answer"]
    except (ValueError, TypeError, KeyError, RecursionError):
        raise UserError(f'{path}, line {number}: is not like {{"prompt": 512, "answer": 128}}; correct it') from None
    if not (isinstance(prompt, str) and prompt) and not (type(prompt) is int and prompt >= 1):
        raise UserError(f"{path}, line {number}: the prompt is neither 1 token or more nor a text; correct it")
    if type(answer) is not int or answer < 1:
        raise UserError(f"{path}, line {number}: the answer is not 1 token or more; correct it")
    return Wanted(prompt, answer)


def choose_lengths(prompts: Lengths, answers: Lengths, lines: list[Wanted], n: int, seed: str) -> list[Wanted]:
    """So many requests, the same for a seed: drawn, or the file's lines in their order, again and again."""
    if lines:
        return [lines[i % len(lines)] for i in range(n)]
    rng = random.Random(f"lengths {seed}")
    return [Wanted(prompts.draw(rng), answers.draw(rng)) for _ in range(n)]
