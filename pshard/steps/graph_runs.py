"""Which steps one CUDA graph may hold: the rule that the runtime, the profile and the planner share. No torch."""

from collections.abc import Iterator, Sequence

from pshard.steps.step import AllReduce, Compute, Handoff, Step, WriteBack

# tokens up to which a prompt's kernels may take less time than launching them: those of a unit take a slow host 0.5 ms,
# and a layer of small experts that two devices share 1.4 ms for 4096
LAUNCH_BOUND = 4096


def find_runs(body: Sequence[Step]) -> Iterator[tuple[int, int]]:
    """(begin, end) of the runs of units on the accelerator, and of their sums, that nothing interrupts.

    A unit that waits for a copy of its weights or keys and values begins a new run, and so may a sum that follows a
    hand-off to the accelerator.
    """
    with_host_kv = {step.unit for step in body if type(step) is WriteBack}
    begin = -1
    for i, step in enumerate(body):
        if type(step) is Compute and step.on == "acc" and step.position != "first":
            if begin >= 0 and (step.slot is not None or step.unit in with_host_kv):
                yield begin, i
                begin = i
        elif not (type(step) is AllReduce and (begin >= 0 or enters(body, i))):
            if begin >= 0:
                yield begin, i
            begin = -1
            continue
        begin = begin if begin >= 0 else i
    if begin >= 0:
        yield begin, len(body)


def enters(body: Sequence[Step], begin: int) -> bool:
    """Whether activations come from the host right before step `begin`."""
    before = body[begin - 1] if begin else None
    return isinstance(before, Handoff) and before.to == "acc"
