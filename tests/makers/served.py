"""The demo model behind the engine's thread: real texts, logits and blocks, on the CPU as accelerator."""

from dataclasses import replace
from pathlib import Path

from cli_world import made_up_profile
from engines import open_engine, pinned_everywhere
from plan_samples import make_tier

from pshard.models import open_model
from pshard.runtime.memory.disk.fake_disk import FakeDisk
from pshard.server.life.local_machine import LocalMachine
from pshard.server.life.read_facts import keep_one_tier, plan_drafts, read_facts
from pshard.units.unit import places_of

DEMO = Path(__file__).parents[2] / "examples" / "demo.gguf"


class EngineLoader:
    """Loads a model file under hand-made tiers; budgets are names of the same plan."""

    budgets = (1, 2)

    def look_again(self, budget, plan, stopped): ...

    def __init__(
        self, path=DEMO, sequences=8, context=4096, tokens=(1, 4, 16, 64, 128), kernels="fast", kv_types=("f32", "f32"),
        deterministic=False, drafts=None, checkpoint_bytes=0, planned=0,
    ):  # fmt: skip
        self.path, self.deterministic, self.drafts = path, deterministic, drafts
        self.shape = {"context": context, "sequences": sequences, "tokens": tokens, "kernels": kernels}
        self.shape |= {"kv_types": kv_types, "checkpoint_bytes": checkpoint_bytes, "drafts": planned}
        self.machines: list[LocalMachine] = []
        self.asked: list[int | None] = []

    def open(self, tiers):
        return open_engine(self.path, tiers, **self.shape, exact=self.deterministic)

    def place(self, spec, budget):
        """Tiers of a budget."""
        return pinned_everywhere(spec, *(self.shape[name] for name in ("tokens", "context", "sequences", "drafts")))

    @property
    def profile(self):
        """The machine by which steps are timed."""
        return made_up_profile()

    def load(self, budget):
        self.asked.append(budget)
        with open_model(self.path) as file:
            tiers = self.place(file.spec, budget)
        engine = self.open(tiers)
        facts = read_facts(engine._executor.spec, self.profile, engine.plan, self.budgets, engine.notes)
        facts = keep_one_tier(facts) if self.deterministic else facts
        machine = LocalMachine(engine, plan_drafts(facts, self.drafts) if self.drafts else facts)
        self.machines.append(machine)
        return machine


class DiskLoader(EngineLoader):
    """Under the budget 2 all is in memory; else what may live on a made-up disk does, and prompts go in sweeps of up to
    eight micro-batches."""

    sweep = 8

    def place(self, spec, budget):
        if budget == 2:
            return super().place(spec, budget)
        tokens, context, sequences = (self.shape[name] for name in ("tokens", "context", "sequences"))
        places = {}
        for unit in spec.units:
            far = [place for place in places_of(unit.kind, False) if place[0] == "disk"]
            places[unit.name] = far[-1] if far else ("pinned", "vram" if unit.kind.state else None)
        sweeps = {tokens[-1]: self.sweep}
        return tuple(
            make_tier(spec, n, places, 2, context, sequences, batch=tokens[-1], sweep=sweeps.get(n, 0)) for n in tokens
        )

    @property
    def profile(self):
        return replace(made_up_profile(), disks=FakeDisk(1e9).timings)
