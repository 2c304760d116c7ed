"""Soak: random prompts, answers, cuts, switches, refused requests and interrupts for some time; logits are checked.

    python benchmarks/soak.py -m MODEL --vram 12000 --seconds 120 -o soak.json

At random moments a sequence's logits are compared with the reference, which is on the CPU for models up to 1 GiB: plain
float32 kernels up to 32 MiB (they take seconds for a prompt of larger ones), the C++ kernels above. For models above
1 GiB it is the same tokens once more from an empty cache as one prompt. Device memory (the driver's figure less
the context) is noted after loading, warm-up, the longest prompt, and at its highest, and must stay within the budget.
An interrupt is a signal at a random moment of a step; an engine that refuses work after it is loaded again.

`--seconds` begin when the model is loaded: warm-up, the longest prompt and checks are in them, and what would take
longer than is left is not begun. What goes on is told on stderr, and the result says what the seconds went to
(checks are counted in what called for them too).
"""

import argparse
import json
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from pshard.errors import StepFailed, UserError
from pshard.models import open_model
from pshard.planner.make_plan import plan_variant
from pshard.registries.profile_store import load_profile
from pshard.runtime.build_engine import build_engine
from pshard.runtime.devices.device import open_device
from pshard.runtime.devices.threads import use_threads
from pshard.runtime.engine import Engine
from pshard.runtime.memory.weights import HostWeights
from pshard.session.this_machine import check_machine, environment_of
from pshard.session.try_plans import SMALL_MODEL
from pshard.units.divide_unit import whole_unit
from pshard.units.kv_cells import longest_sequence
from pshard.workload import Workload

if TYPE_CHECKING:
    import torch

MOST_ERROR = 1e-2  # normalised mean square: int8 and bfloat16 activations stay below, a wrong cell is near 1
FLIPPED_ERROR = 0.6  # of a token that takes another expert: scores are nearly equal, and rounding differs
PLAIN_MODEL = 32 << 20  # bytes up to which plain kernels are the reference
SHORT = 64  # tokens at most of a step that is interrupted
TELL = 5.0  # seconds from one line about what was done to the next


class Soak:
    """An engine that is used and abused, what it should have cached, and what was found."""

    def __init__(self, args: Any) -> None:
        self.args, self.rng = args, random.Random(args.seed)
        self.began = self.told = time.monotonic()
        self.seconds: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        self.peaks_mib: dict[str, float] = {}
        self.errors: list[float] = []
        self.file, self.profile = open_model(args.model), load_profile(args.profile)
        check_machine(self.profile)
        use_threads(self.profile.host.threads)
        self.kind = self.profile.accelerators[0].kind
        args.context = longest_sequence(self.file.spec.config, args.context)
        workload = Workload(
            (args.vram,), args.context * args.sequences, args.sequences, prompt=args.context // 2, generated=64
        )
        with self.timed("planning"):
            self.variant = plan_variant(self.file.spec, self.profile, workload)
        self.tell("planned")
        with self.timed("packing weights"):
            self.weights = HostWeights(map(whole_unit, self.file.spec.units), open_device(self.kind))
            self.weights.load(self.file, None, lambda _: None)
        self.tell(f"{self.weights.nbytes >> 20} MiB of weights are packed")
        nbytes = self.file.spec.packed_nbytes
        self.reference_kernels = "plain" if nbytes <= PLAIN_MODEL else "fast"
        self.reference = self._open_reference() if nbytes <= SMALL_MODEL else None
        self.engine = self._open(self.variant, "fast", self.kind)
        self.history: list[list[int]] = [[] for _ in range(args.sequences)]
        self.checked_rate = 0.0  # seconds per token of the slowest check yet
        self.short_step = 0.0  # seconds of a step of SHORT tokens a sequence
        self.note_memory("load")
        self.end = time.monotonic() + args.seconds
        self.tell("loaded")

    def _open(self, variant: Any, kernels: str, kind: str) -> Engine:
        with self.timed("loading"):
            device, tiles = open_device(kind), self.profile.tiles_of(0)
            return build_engine(self.file, variant, device, kernels=kernels, lender=self.weights, tiles=tiles)

    def _open_reference(self) -> Engine:
        roomy = Workload((1 << 20,), self.args.context)
        on_cpu = replace(self.profile, accelerators=(replace(self.profile.accelerators[0], kind="cpu"),))
        return self._open(plan_variant(self.file.spec, on_cpu, roomy), self.reference_kernels, "cpu")

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """Add the seconds of a block to what was spent on `what`."""
        start = time.monotonic()
        yield
        self.seconds[what] += time.monotonic() - start

    def tell(self, what: str) -> None:
        """A line on stderr, with the seconds since the start."""
        self.told = time.monotonic()
        print(f"{self.told - self.began:7.1f} s  {what}", file=sys.stderr, flush=True)

    def note_memory(self, when: str) -> None:
        """Keep the most that was ever held at such a moment."""
        held = self.engine.memory().accelerator / (1 << 20)
        self.peaks_mib[when] = max(held, self.peaks_mib.get(when, 0.0))

    def ids(self, n: int) -> list[int]:
        """n random tokens."""
        return [self.rng.randrange(self.engine.vocab) for _ in range(n)]

    def step(self, new: list[list[int]]) -> "list[torch.Tensor]":
        """Give tokens to the engine and remember them."""
        logits = self.engine.forward(new)
        self.history = [h + ids for h, ids in zip(self.history, new)]
        self.note_memory("highest")
        assert isinstance(logits, list)
        return logits

    def talk(self) -> None:
        """Prompts of random lengths for some sequences, then a few tokens of answer; sometimes checked."""
        context = self.args.context
        new = []
        for h in self.history:
            room = context - len(h)
            new.append(self.ids(min(room, int(context ** self.rng.random()))) if self.rng.random() < 0.7 else [])
        if not any(new):
            return
        logits = self.step(new)
        for _ in range(self.rng.randint(0, 6)):
            new = [self.ids(1) if h and len(h) < context else [] for h in self.history]
            if any(new):
                logits = self.step(new)
        self.counts["conversations"] += 1
        if self.rng.random() < self.args.check and any(new):
            self.check(logits, self.rng.choice([i for i, ids in enumerate(new) if ids]))

    def check(self, logits: "list[torch.Tensor]", sequence: int) -> None:
        """Compare one sequence's logits with the reference: the first always, others where the time left allows it."""
        tokens = len(self.history[sequence])
        if self.errors and self.checked_rate * tokens > self.end - time.monotonic():
            self.counts["checks left out"] += 1
            return
        engine = self.reference or self.engine
        start = time.monotonic()
        with self.timed("checks"):
            engine.reset()
            if self.reference is None:
                alone: list[list[int]] = [[] for _ in self.history]
                alone[sequence] = self.history[sequence]
                expected = engine.forward(alone)[sequence]
                self.history = alone
            else:
                expected = engine.forward(self.history[sequence])
        assert not isinstance(expected, list)
        self.checked_rate = max(self.checked_rate, (time.monotonic() - start) / max(tokens, SHORT))
        centred = expected - expected.mean()
        self.errors.append(float((logits[sequence] - expected).pow(2).sum() / centred.pow(2).sum()))
        self.counts["checks"] += 1

    def cut(self) -> None:
        """A sequence leaves, or an answer is taken back."""
        s = self.rng.randrange(len(self.history))
        keep = self.rng.randint(0, len(self.history[s])) if self.rng.random() < 0.5 else 0
        self.history[s] = self.history[s][:keep]
        self.engine.reset(s, keep)
        self.counts["cuts"] += 1

    def refuse(self) -> None:
        """A request that must change nothing."""
        try:
            self.engine.forward([[self.engine.vocab]])
            raise SystemExit("a token outside the vocabulary was taken")
        except UserError:
            self.counts["refused"] += 1

    def interrupt(self) -> None:
        """Ctrl-C somewhere in a step: it goes on, or refuses and is loaded again."""
        self.make_room()
        new = [self.ids(min(self.args.context - len(h), 1 + self.rng.randrange(SHORT))) for h in self.history]
        before = self.counts["interrupts"]
        try:
            signal.setitimer(signal.ITIMER_REAL, self.rng.uniform(0.01, 1.2) * self.short_step)
            self.engine.forward(new)
            signal.setitimer(signal.ITIMER_REAL, 0)
        except KeyboardInterrupt:
            pass
        except StepFailed:  # a graph whose capture is interrupted ends in an error of its own
            signal.setitimer(signal.ITIMER_REAL, 0)
            if self.counts["interrupts"] == before:
                raise
        whole = [h + ids for h, ids in zip(self.history, new)]
        self.history = [h[:n] for h, n in zip(whole, self.engine.lengths)]
        self.make_room()
        try:
            self.step([self.ids(int(len(h) < self.args.context)) for h in self.history])
        except StepFailed:
            self.counts["loaded again"] += 1
            self.counts["switches"] += self.engine.switches
            self.engine.close()
            self.engine = self._open(self.variant, "fast", self.kind)
            self.forget()

    def note_interrupt(self, *_: Any) -> None:
        """The signal's handler."""
        self.counts["interrupts"] += 1
        raise KeyboardInterrupt

    def make_room(self) -> None:
        """Empty all sequences where none has room for a token."""
        if all(len(h) == self.args.context for h in self.history):
            self.forget()

    def forget(self) -> None:
        """Empty all sequences."""
        self.engine.reset()
        self.history = [[] for _ in self.history]

    def warm_up(self) -> None:
        """The first steps compile kernels; a short one is timed, and its logits are checked."""
        with self.timed("warm-up"):
            self.step([self.ids(1) for _ in self.history])
            for _ in range(2):
                self.forget()
                start = time.monotonic()
                logits = self.step([self.ids(SHORT) for _ in self.history])
                self.short_step = time.monotonic() - start
        self.note_memory("warm-up")
        self.tell(f"warm; a step of {SHORT} tokens a sequence takes {1e3 * self.short_step:.0f} ms")
        self.check(logits, 0)
        self.forget()
        with self.timed("longest prompt"):
            self.step([self.ids(self.args.context) for _ in self.history])
        self.note_memory("longest prompt")
        self.tell("the longest prompt is done")

    def run(self) -> None:
        """Warm up, take the longest prompt, then anything until the time is over and each kind was done."""
        self.warm_up()
        actions = [self.talk] * 5 + [self.cut] * 4 + [self.refuse] + [self.interrupt] * self.args.interrupts
        while time.monotonic() < self.end or not self.has_done_all():
            action = self.rng.choice(actions)
            with self.timed(action.__name__):
                action()
            if time.monotonic() > self.told + TELL:
                self.tell(", ".join(f"{n} {what}" for what, n in self.counts.items()))
        self.counts["switches"] += self.engine.switches

    def has_done_all(self) -> bool:
        """Whether every kind of action has had an effect at least once, on however slow a machine."""
        kinds = ["conversations", "cuts", "refused"] + ["interrupts"] * (self.args.interrupts > 0)
        return all(self.counts[kind] for kind in kinds)

    def close(self) -> None:
        """Close both engines, then the weights that they shared."""
        self.engine.close()
        if self.reference is not None:
            self.reference.close()
        self.weights.close()

    def record(self) -> dict[str, Any]:
        """What is written: counts, peaks beside the budget, errors, and whether all is well."""
        worst, routed = max(self.errors, default=0.0), self.file.spec.config.experts is not None
        within = all(mib <= self.args.vram for mib in self.peaks_mib.values())
        return {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": f"soak.py -m {self.args.model.name} --vram {self.args.vram} --seconds {self.args.seconds:g}",
            "environment": dict(environment_of(self.profile)),
            "reference": f"{self.reference_kernels} kernels" if self.reference else "one prompt from an empty cache",
            "counts": dict(self.counts),
            "seconds": {what: round(s, 2) for what, s in self.seconds.items()},
            "peaks_mib": self.peaks_mib,
            "budget_mib": self.args.vram,
            "worst_error": worst,
            "median_error": median(self.errors) if self.errors else 0.0,
            "passed": is_right(self.errors, routed) and within,
        }


def is_right(errors: list[float], routed: bool) -> bool:
    """Whether logits were checked and right. routed: of a model with routed experts, whose tokens take others now and
    then for no fault of the engine; half of the checks must be as near as those of other models."""
    if not errors:
        return False
    return max(errors) <= (FLIPPED_ERROR if routed else MOST_ERROR) and median(errors) <= MOST_ERROR


def main() -> int:
    """Run; exit code 1 when logits were off or memory exceeded the budget."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0], allow_abbrev=False)
    parser.add_argument("-m", "--model", type=Path, required=True)
    parser.add_argument("--vram", type=int, required=True, help="MiB")
    parser.add_argument("-c", "--context", type=int, default=2048)
    parser.add_argument("-np", "--sequences", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=60.0, help="from when the model is loaded (60)")
    parser.add_argument("--check", type=float, default=0.25, help="share of the conversations whose end is checked")
    parser.add_argument("--interrupts", type=int, default=1, help="interrupts, in 10 other actions")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--profile", type=Path)
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()

    try:
        soak = Soak(args)
    except UserError as error:
        print(f"error: {error}")
        return 2
    signal.signal(signal.SIGALRM, soak.note_interrupt)
    try:
        soak.run()
        record = soak.record()
    finally:
        soak.close()
    print(json.dumps({k: v for k, v in record.items() if k != "environment"}, indent=1))
    if args.output:
        args.output.write_text(json.dumps(record, indent=1) + "\n")
    return 0 if record["passed"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
