"""Soak: random prompts, answers, cuts, switches, refused requests and interrupts for some time; logits are checked.

    python benchmarks/soak.py -m MODEL --vram 12000 --seconds 120 -o soak.json

At random moments a sequence's logits are compared with the reference: plain float32 kernels on the CPU for models up
to 1 GiB, else the same tokens once more from an empty cache as one prompt. Device memory (the driver's figure less
the context) is noted after loading, warm-up, the longest prompt, and at its highest, and must stay within the budget.
An interrupt is a signal at a random moment of a step; an engine that refuses work after it is loaded again.
"""

import argparse
import json
import random
import signal
import time
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from pshard.errors import StepFailed, UserError
from pshard.machine_store import load_profile
from pshard.models import open_model
from pshard.opening import check_machine, environment_of
from pshard.planner.plan import plan_variant
from pshard.runtime.device import open_device
from pshard.runtime.engine import Engine
from pshard.runtime.session import build_engine
from pshard.runtime.threads import use_threads
from pshard.runtime.weights import HostWeights
from pshard.validating import SMALL_MODEL
from pshard.workload import Workload

MOST_ERROR = 1e-2  # normalised mean square: int8 and bfloat16 activations stay below, a wrong cell is near 1


class Soak:
    """An engine that is used and abused, what it should have cached, and what was found."""

    def __init__(self, args: Any) -> None:
        self.args, self.rng = args, random.Random(args.seed)
        self.file, self.profile = open_model(args.model), load_profile(args.profile)
        check_machine(self.profile)
        use_threads(self.profile.host.threads)
        self.kind = self.profile.accelerators[0].kind
        workload = Workload(
            (args.vram,), args.context * args.sequences, args.sequences, prompt=args.context // 2, generated=64
        )
        self.variant = plan_variant(self.file.spec, self.profile, workload)
        self.weights = HostWeights(self.file.spec.units, open_device(self.kind))
        self.weights.load(self.file, None, lambda _: None)
        small = self.file.spec.packed_nbytes <= SMALL_MODEL
        roomy = Workload((1 << 20,), args.context)
        self.reference = (
            self._open(plan_variant(self.file.spec, self.profile, roomy), "plain", "cpu") if small else None
        )
        self.engine = self._open(self.variant, "fast", self.kind)
        self.history: list[list[int]] = [[] for _ in range(args.sequences)]
        self.counts: Counter[str] = Counter()
        self.peaks_mib: dict[str, float] = {}
        self.errors: list[float] = []
        self.note_memory("load")

    def _open(self, variant: Any, kernels: str, kind: str) -> Engine:
        return build_engine(self.file, variant, open_device(kind), kernels=kernels, lender=self.weights)

    def note_memory(self, when: str) -> None:
        """Keep the most that was ever held at such a moment."""
        held = self.engine.memory().accelerator / (1 << 20)
        self.peaks_mib[when] = max(held, self.peaks_mib.get(when, 0.0))

    def ids(self, n: int) -> list[int]:
        """n random tokens."""
        return [self.rng.randrange(self.engine.vocab) for _ in range(n)]

    def step(self, new: list[list[int]]) -> list[torch.Tensor]:
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

    def check(self, logits: list[torch.Tensor], sequence: int) -> None:
        """Compare one sequence's logits with the reference."""
        engine = self.reference or self.engine
        engine.reset()
        if self.reference is None:
            alone: list[list[int]] = [[] for _ in self.history]
            alone[sequence] = self.history[sequence]
            expected = engine.forward(alone)[sequence]
            self.history = alone
        else:
            expected = engine.forward(self.history[sequence])
        assert isinstance(expected, torch.Tensor)
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
        new = [self.ids(min(self.args.context - len(h), 1 + self.rng.randrange(64))) for h in self.history]
        if not any(new):
            return
        signal.setitimer(signal.ITIMER_REAL, self.rng.uniform(1e-4, self.args.longest_step))
        try:
            self.engine.forward(new)
        except KeyboardInterrupt:
            self.counts["interrupts"] += 1
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        whole = [h + ids for h, ids in zip(self.history, new)]
        self.history = [h[:n] for h, n in zip(whole, self.engine.lengths)]
        try:
            if any(0 < len(h) < self.args.context for h in self.history):
                self.step([self.ids(1) if 0 < len(h) < self.args.context else [] for h in self.history])
        except StepFailed:
            self.counts["loaded again"] += 1
            self.counts["switches"] += self.engine.switches
            self.engine.close()
            self.engine = self._open(self.variant, "fast", self.kind)
            self.history = [[] for _ in self.history]

    def run(self) -> None:
        """Warm up, take the longest prompt, then anything until the time is over."""
        self.step([self.ids(1) for _ in self.history])
        self.note_memory("warm-up")
        self.engine.reset()
        self.history = [[] for _ in self.history]
        self.step([self.ids(self.args.context) for _ in self.history])
        self.note_memory("longest prompt")
        end = time.monotonic() + self.args.seconds
        while time.monotonic() < end:
            actions = [self.talk] * 5 + [self.cut] * 4 + [self.refuse] + [self.interrupt] * self.args.interrupts
            self.rng.choice(actions)()
        self.counts["switches"] += self.engine.switches

    def close(self) -> None:
        """Close both engines, then the weights that they shared."""
        self.engine.close()
        if self.reference is not None:
            self.reference.close()
        self.weights.close()

    def record(self) -> dict[str, Any]:
        """What is written: counts, peaks beside the budget, errors, and whether all is well."""
        worst = max(self.errors, default=0.0)
        within = all(mib <= self.args.vram for mib in self.peaks_mib.values())
        return {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": f"soak.py -m {self.args.model.name} --vram {self.args.vram} --seconds {self.args.seconds:g}",
            "environment": dict(environment_of(self.profile)),
            "reference": "plain kernels" if self.reference else "one prompt from an empty cache",
            "counts": dict(self.counts),
            "peaks_mib": self.peaks_mib,
            "budget_mib": self.args.vram,
            "worst_error": worst,
            "passed": bool(self.errors) and worst <= MOST_ERROR and within,
        }


def main() -> int:
    """Run; exit code 1 when logits were off or memory exceeded the budget."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0], allow_abbrev=False)
    parser.add_argument("-m", "--model", type=Path, required=True)
    parser.add_argument("--vram", type=int, required=True, help="MiB")
    parser.add_argument("-c", "--context", type=int, default=2048)
    parser.add_argument("-np", "--sequences", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--check", type=float, default=0.25, help="share of the conversations whose end is checked")
    parser.add_argument("--interrupts", type=int, default=1, help="interrupts, in 10 other actions")
    parser.add_argument("--longest-step", type=float, default=0.3, help="seconds within which an interrupt comes")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--profile", type=Path)
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, interrupt)
    try:
        soak = Soak(args)
    except UserError as error:
        print(f"error: {error}")
        return 2
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
