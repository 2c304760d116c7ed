"""The order in which an accelerator that runs ahead and the CPU's thread meet."""

from pshard.runtime.walks.ahead_program import Await, Stretch, Tell, make_ahead
from pshard.runtime.walks.walk_program import HostRun, Launch, group_launches, group_on_host
from pshard.steps.move import Move, bring_experts, bring_weights, hand_over, join_part
from pshard.steps.step import Compute, Free

EMBEDDING = Compute("embedding", "cpu", "host", position="first")
OUTPUT = Compute("output", "acc", "arena", position="last")


def divided(i: int, source: str = "arena") -> list:
    """A layer whose CPU computes a part."""
    name, slot = f"ffn.{i}", 0 if source == "slot" else None
    return [
        Compute(f"attention.{i}", "acc", "arena"), hand_over("cpu", 8),
        Compute(name, "acc", source, slot, part="share", cpu_rows=3),
        Compute(name, "cpu", "host", part="share", cpu_rows=3),
        join_part(name, 8, 2), Compute(name, "acc", source, slot, part="rest", cpu_rows=3),
    ]  # fmt: skip


def program(*body):
    return make_ahead(tuple(group_on_host(group_launches(body), "cpu")))


def describe(stretch: Stretch) -> list:
    return [part if not isinstance(part, Launch) else [step.unit for step in part.steps] for part in stretch.parts]


def test_all_of_a_token_is_one_stretch_where_nothing_is_copied():
    found = program(EMBEDDING, hand_over("acc", 8), *divided(0), *divided(1), OUTPUT, hand_over("cpu", 9))
    assert found is not None and [type(step) for step in found.body] == [HostRun, Stretch]
    assert describe(found.body[1]) == [
        ["attention.0"], Tell(0, ("hidden",)), ["ffn.0"], Await(0, join_part("ffn.0", 8, 2)), ["ffn.0", "attention.1"],
        Tell(1, ("hidden",)), ["ffn.1"], Await(1, join_part("ffn.1", 8, 2)), ["ffn.1", "output"],
    ]  # fmt: skip
    assert [run.steps[0].unit for run in found.runs] == ["ffn.0", "ffn.1"]
    assert found.body[1].launches[0].enters == ("hidden",), "what the launching thread has computed enters at once"


def test_experts_that_follow_use_are_moved_before_the_stretch():
    found = program(bring_experts(5), EMBEDDING, hand_over("acc", 8), *divided(0), OUTPUT, hand_over("cpu", 9))
    assert found is not None and [type(step) for step in found.body] == [Move, HostRun, Stretch]


def test_activations_that_come_back_from_the_cpu_are_awaited():
    cpu = Compute("ffn.0", "cpu", "host")
    found = program(
        EMBEDDING, hand_over("acc", 8), Compute("attention.0", "acc", "arena"), hand_over("cpu", 8), cpu,
        hand_over("acc", 8), Compute("attention.1", "acc", "arena"), OUTPUT, hand_over("cpu", 9),
    )  # fmt: skip
    assert found is not None
    parts = found.body[1].parts
    assert parts[1:3] == (Tell(0, ("hidden",)), Await(0, hand_over("acc", 0, ("hidden",))))
    assert parts[3].enters == (), "the wait comes first"
    assert found.runs == (HostRun((cpu,)),)


def test_a_unit_that_waits_for_its_copy_begins_a_stretch():
    found = program(
        EMBEDDING, hand_over("acc", 8), *divided(0, "slot"), Free(0), bring_weights("ffn.1", 0, 9),
        *divided(1, "slot"), OUTPUT, hand_over("cpu", 9),
    )  # fmt: skip
    assert found is not None
    for stretch in (step for step in found.body if isinstance(step, Stretch)):
        slots = [step.slot for launch in stretch.launches for step in launch.steps[1:]]
        assert set(slots) <= {None}, "an event is waited for before a graph, not in it"
    order = [type(step) for step in found.body]
    assert order.index(Free) < order.index(Move) and len(found.runs) == 2


def test_what_needs_the_launching_thread_is_not_run_ahead():
    layers = (hand_over("acc", 8), *divided(0))
    assert program(EMBEDDING, *layers, hand_over("cpu", 8), Compute("output", "cpu", "host", position="last")) is None
    assert (
        program(EMBEDDING, hand_over("acc", 8), Compute("attention.0", "acc", "arena"), OUTPUT, hand_over("cpu", 9))
        is None
    )
