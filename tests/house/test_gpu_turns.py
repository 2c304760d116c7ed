"""A test that has the GPU for itself waits for those that use it, and those that come later wait for it."""

import fcntl
from pathlib import Path
from threading import Event, Thread

import pytest
from gpu_turns import take_turn


def is_free(file: Path, for_one: bool) -> bool:
    with file.open("w") as opened:
        try:
            fcntl.flock(opened, (fcntl.LOCK_EX if for_one else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def test_who_is_alone_waits_for_those_before_and_goes_before_those_behind(tmp_path: Path) -> None:
    order, enough = list[str](), Event()

    def take(alone: bool) -> None:
        with take_turn(alone, tmp_path):
            order.append("alone" if alone else "beside")
            if alone:
                enough.wait(60)

    first, second = Thread(target=take, args=(True,)), Thread(target=take, args=(False,))
    with take_turn(False, tmp_path), take_turn(False, tmp_path):
        first.start()
        while is_free(tmp_path / "gate", True):  # until it stands there
            pass
        second.start()
        assert not order
    while not order:
        pass
    assert order == ["alone"] and not is_free(tmp_path / "turn", False)
    enough.set()
    for thread in (first, second):
        thread.join(60)
    assert order == ["alone", "beside"] and is_free(tmp_path / "turn", True)


def test_a_test_that_fails_gives_its_turn_back(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no"), take_turn(True, tmp_path):
        raise ValueError("no")
    assert is_free(tmp_path / "turn", True) and is_free(tmp_path / "gate", True)
