"""Answers of one load to a LoadPoint: spreads of times, rates, and how many kept a promise."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from pshard.session.serve_bench.arrivals import Pattern
from pshard.session.serve_bench.drive import Driven
from pshard.session.serve_bench.read_reply import Answer, read_reply
from pshard.session.serve_bench.write_prompts import Planned
from pshard.times.server_load import LoadPoint, spread_of

PROMISES = ("ttft", "gap", "end")  # what can be promised, in ms: the first text, each gap, the whole answer


@dataclass(frozen=True)
class Told:
    """A request as it was planned, and its answer."""

    planned: Planned
    answer: Answer

    @property
    def polite(self) -> bool:
        return not self.planned.manner.bytes_per_read and self.planned.manner.leave_after is None

    @property
    def whole(self) -> bool:
        return not self.answer.failure


def sum_up(pattern: Pattern, driven: Driven, promise: dict[str, float]) -> tuple[LoadPoint, list[str]]:
    """The figures, and a line for each kind of error, with what the first of them said."""
    told = [Told(planned, read_reply(reply)) for planned, reply in driven.pairs]
    answers = [each.answer for each in told]
    began = min((a.began for a in answers), default=0)
    seconds = max(1e-9, (max((a.ended for a in answers), default=0) - began) / 1e9)
    errors = Counter(a.failure for a in answers if a.failure not in ("", "left"))
    quick = [each for each in told if not each.planned.manner.bytes_per_read]
    kept = sum(keeps(each.answer, promise) for each in told if each.polite) if promise else None
    prompt_tokens = sum(_prompt_tokens(a) for a in answers)
    answer_tokens = sum(_answer_tokens(a) for a in answers)
    point = LoadPoint(
        pattern=pattern.kind,
        load=pattern.load,
        burst=pattern.burst,
        requests=len(told),
        whole=sum(each.whole for each in told),
        cancelled=sum(a.failure == "left" for a in answers),
        slow=len(told) - len(quick),
        errors=tuple(sorted(errors.items())),
        seconds=seconds,
        prompt_tokens=prompt_tokens,
        cached_tokens=sum(a.cached or 0 for a in answers),
        answer_tokens=answer_tokens,
        counted="events" if any(a.made is None for a in answers if not a.failure) else "usage",
        prompt_rate=prompt_tokens / seconds,
        answer_rate=answer_tokens / seconds,
        steady_rate=_steady_rate(pattern, answers, began, driven.last_sent),
        first_token=spread_of([(a.texts[0] - a.began) / 1e6 for a in _of(quick) if a.texts]),
        gap=spread_of([gap for a in _of(quick) for gap in gaps_ms(a)]),
        end=spread_of([(e.answer.ended - e.answer.began) / 1e6 for e in told if e.polite and e.whole]),
        kept=kept,
        goodput=None if kept is None else kept / seconds,
        late_ms=driven.late_ms,
    )
    first_said = {a.failure: a.said for a in reversed(answers) if a.failure not in ("", "left")}
    return point, [f"{n} x {what}: {first_said[what] or 'nothing said'}" for what, n in sorted(errors.items())]


def keeps(answer: Answer, promise: dict[str, float]) -> bool:
    """Whether an answer came whole and within the promise, every gap of it."""
    if answer.failure or not answer.texts:
        return False
    worst = {
        "ttft": (answer.texts[0] - answer.began) / 1e6,
        "gap": max(gaps_ms(answer), default=0.0),
        "end": (answer.ended - answer.began) / 1e6,
    }
    return all(worst[what] <= most for what, most in promise.items())


def gaps_ms(answer: Answer) -> list[float]:
    """Milliseconds between pieces of text."""
    return [(after - before) / 1e6 for before, after in pairwise(answer.texts)]


def _of(told: Sequence[Told]) -> list[Answer]:
    return [each.answer for each in told]


def _prompt_tokens(answer: Answer) -> int:
    """Of prompts that were computed: whose answer began."""
    return answer.prompt or 0


def _answer_tokens(answer: Answer) -> int:
    """As the server counts them; of answers that did not come to their usage, the pieces that came."""
    return answer.made if answer.made is not None else len(answer.texts)


def _steady_rate(pattern: Pattern, answers: Sequence[Answer], began: int, last_sent: int) -> float | None:
    """Answer tokens per second until the last request was sent: from then on clients have nothing more to do."""
    if len(answers) < 2 * pattern.clients or not pattern.clients or last_sent <= began:
        return None
    tokens = 0.0
    for a in answers:
        if a.texts:
            tokens += _answer_tokens(a) * sum(at <= last_sent for at in a.texts) / len(a.texts)
    return tokens * 1e9 / (last_sent - began)
