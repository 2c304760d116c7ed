"""The list of steps: what a unit computes from is there when it computes, micro-batch after micro-batch."""

import random

from experts_file import RULES, ExpertsFile
from hypothesis import given
from hypothesis import strategies as st
from plan_samples import make_tier, mix_parts, random_places
from planner_cases import models

from pshard.cuts.rank_parts import split_model
from pshard.steps.emit import emit_steps
from pshard.steps.move import Activations, Move, Weights
from pshard.steps.step import AllReduce, Compute, Free, Gather, Receive, Send, StepShape
from pshard.units.embedding import EMBEDDING
from pshard.units.moe.experts import EXPERTS
from pshard.units.moe.shared_experts import SHARED_EXPERTS
from pshard.workload import Split


@given(
    models(),
    st.sampled_from(("none", "layer", "tensor")),
    st.lists(st.sampled_from((0.0, 1.0, 3.0)), min_size=2, max_size=5).filter(any),
    st.integers(0, 10**6),
    st.integers(1, 4),
)
def test_every_unit_computes_once_and_finds_its_weights_in_its_slot(spec, mode, shares, seed, slots) -> None:
    rng = random.Random(seed)
    for rank in range(len(shares)):
        part = split_model(spec, Split(mode, shares), rank)
        tier = make_tier(part, 16, random_places(part, rng), slots, 64, 1)
        steps = emit_steps(part, tier, StepShape(16, 0, 1, ranks=len(shares)))
        lying: dict[int, str | None] = {copy.slot: copy.unit for copy in steps.enter}
        for _ in range(3):
            done = []
            for step in steps.body:
                match step:
                    case Move(portion=Weights()):
                        assert lying[step.slot] is None, "a slot is overwritten before it is free"
                        lying[step.slot] = step.unit
                    case Compute():
                        done.append(step.unit)
                        assert step.source != "slot" or lying[step.slot] == step.unit
                    case Free() if any(s for s in steps.body if isinstance(s, Move) and s.slot == step.slot):
                        lying[step.slot] = None
            assert done == [u.name for u in part.units if u.tensors or not part.neighbours]


@given(models(), st.lists(st.sampled_from((0.0, 1.0, 3.0)), min_size=2, max_size=5).filter(any), st.integers(0, 99))
def test_hidden_states_leave_from_the_side_that_the_next_rank_expects(spec, shares, seed) -> None:
    rng = random.Random(seed)
    for rank in range(len(shares)):
        part = split_model(spec, Split("layer", shares), rank)
        tier = make_tier(part, 16, random_places(part, rng), 2, 64, 1)
        body = emit_steps(part, tier, StepShape(16, 0, 1, ranks=len(shares))).body
        sides = {u.name: "cpu" if tier.placement(u.name).where == "cpu" else "acc" for u in part.units}
        side = "cpu"
        for step in body:
            match step:
                case Receive():
                    side = "acc"
                case Move(portion=Activations()):
                    side = "acc" if step.is_to_acc else "cpu"
                case Compute():
                    assert part.unit(step.unit).kind is EMBEDDING or side == sides[step.unit]
                    side = sides[step.unit]
                case Send():
                    assert side == "acc"
        assert sum(isinstance(s, Gather) for s in body) == 1
        kinds = [type(s) for s in body if isinstance(s, Receive | Send)]
        assert kinds == [
            k for k, peer in ((Receive, part.neighbours.source), (Send, part.neighbours.target)) if peer is not None
        ]


@given(st.sampled_from(((1.0, 1.0), (3.0, 1.0), (0.0, 1.0))), st.booleans(), st.integers(0, 999))
def test_a_layers_shared_and_routed_experts_are_summed_at_once(shares, sums_on_host, seed) -> None:
    """What a rank has of the shared ones is brought to where it adds up the routed ones, so all ranks sum as often."""
    whole, rng = ExpertsFile(RULES["with shared experts"], layers=2).spec, random.Random(seed)
    for rank in range(len(shares)):
        part = split_model(whole, Split("tensor", shares), rank)
        tier = make_tier(part, 4, mix_parts(part, random_places(part, rng), rng), 2, 64, 1)
        body = emit_steps(part, tier, StepShape(4, 0, 1, ranks=len(shares), sums_on_host=sums_on_host)).body
        summed = [step.unit for step in body if isinstance(step, AllReduce)]
        assert summed == [f"blk.{i}.{name}" for i in range(2) for name in ("attention", "experts")]
        begun, side = "", "cpu"  # where the part is that the routed experts add to, and where hidden states are
        for step in body:
            match step:
                case Move(portion=Activations(names)):
                    side = "acc" if step.is_to_acc else "cpu"
                    begun = side if "branch" in names else begun
                case Compute() if part.unit(step.unit).kind is SHARED_EXPERTS:
                    begun = side = step.on
                case Compute() if part.unit(step.unit).kind is EXPERTS and step.part != "share":
                    assert begun == step.on
                    side = step.on
                case Compute():
                    side = step.on if step.part != "share" else side
                case AllReduce():
                    assert sums_on_host or side == "acc"
