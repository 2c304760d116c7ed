"""What steps are called where they are printed or drawn. No torch."""

from pshard.homes import ACC, CPU
from pshard.steps.move import Activations, Move, NewExperts, Part, UnitState, WaitingRows
from pshard.steps.step import AllReduce, Compute, Receive, Send, Step
from pshard.units.share import Wave


def label_step(step: Step) -> str:
    """What a step is about, in a word or two."""
    if isinstance(step, Compute):
        return f"{step.unit} {step.part}" if step.part else step.unit + _label_wave(step.wave)
    if isinstance(step, Move):
        return _label_move(step)
    if isinstance(step, AllReduce):
        return "all-reduce"
    if isinstance(step, Receive):
        return f"from rank {step.source}"
    if isinstance(step, Send):
        return f"to rank {step.target}"
    return type(step).__name__


def _label_move(step: Move) -> str:
    match step.portion:
        case Part(unit):
            return f"join {unit}"
        case UnitState(unit):
            return f"KV {unit}" if step.is_to_acc else f"KV {unit} back"
        case Activations():
            return f"to {ACC if step.is_to_acc else CPU}"
        case NewExperts():
            return "new experts"
        case WaitingRows():
            return "rows taken up" if step.portion.returns else "rows put aside"
    return step.unit + _label_wave(step.wave)


def _label_wave(wave: Wave) -> str:
    return f", wave {wave.number + 1} of {wave.of}" if wave.of > 1 else ""
