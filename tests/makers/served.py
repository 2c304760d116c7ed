"""The demo model behind the engine's thread: real texts, logits and blocks, on the CPU as accelerator."""

from pathlib import Path

from cli_world import made_up_profile
from engines import open_engine, pinned_everywhere

from pshard.models import open_model
from pshard.server.life.local_machine import LocalMachine
from pshard.server.life.read_facts import keep_one_tier, plan_drafts, read_facts

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

    def load(self, budget):
        self.asked.append(budget)
        with open_model(self.path) as file:
            sizes = (self.shape[name] for name in ("tokens", "context", "sequences", "drafts"))
            tiers = pinned_everywhere(file.spec, *sizes)
        engine = self.open(tiers)
        facts = read_facts(engine._executor.spec, made_up_profile(), engine.plan, self.budgets, engine.notes)
        facts = keep_one_tier(facts) if self.deterministic else facts
        machine = LocalMachine(engine, plan_drafts(facts, self.drafts) if self.drafts else facts)
        self.machines.append(machine)
        return machine
