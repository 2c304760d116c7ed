"""Events of the CPU as accelerator: what an interrupt in a wait leaves behind."""

import sys
import threading
from types import FrameType
from typing import Any

import pytest

from pshard.runtime.devices.device import CpuEvent


def wait_interrupted(event: CpuEvent, after: int) -> bool:
    """Wait, with Ctrl-C before the bytecode instruction number `after`; whether it came to that."""
    left = after

    def trace(frame: FrameType, kind: str, _: Any) -> Any:
        nonlocal left
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if kind == "opcode":
            left -= 1
            if left < 0:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        event.wait()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


@pytest.mark.parametrize("happens", ["before the wait", "in the wait"])
def test_an_interrupt_anywhere_in_a_wait_holds_up_nobody(happens: str) -> None:
    """Who finishes the event goes on, and so does who waits for it later."""
    for after in range(1000):
        event = CpuEvent()
        if happens == "before the wait":
            event.finish()
        finisher = threading.Timer(0.002, event.finish)
        if happens == "in the wait":
            finisher.start()
        interrupted = wait_interrupted(event, after)
        if happens == "in the wait":
            finisher.join(60)
            assert not finisher.is_alive(), f"stands still after an interrupt at instruction {after}"
        later = threading.Thread(target=event.wait, daemon=True)
        later.start()
        later.join(60)
        assert not later.is_alive() and event.succeeded
        if not interrupted:
            assert after > 3
            return
    raise AssertionError("the wait never ended by itself")
