"""Files that are no files, links in a circle, what killed writers leave, locks that are held: a line each."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from cli_world import edit_json, write_profile

from pshard import file_lock
from pshard.errors import UserError
from pshard.file_lock import hold_lock, wait_for_lock
from pshard.jsonio import STALE_SECONDS, from_json, write_text_atomically
from pshard.models import open_model
from pshard.models.keys import FACTORS, Keys
from pshard.registries.profile_store import load_profile
from pshard.registries.routing_file import is_routing, read_routing
from pshard.registries.store import load_registry, registry_path
from pshard.reports.inputs import read_nouns
from pshard.times.outlook import Forecast

READERS: dict[str, Callable[[Path], object]] = {
    "registry": load_registry,
    "profile": load_profile,
    "report": read_nouns,
    "routing": read_routing,
    "model": open_model,
}
HOLDER = """
import sys, time
from filelock import FileLock
with FileLock(sys.argv[1]):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_a_pipe_is_told_to_be_no_file_and_is_not_waited_for(tmp_path: Path, read: Callable[[Path], object]) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="It is no regular file"):
        read(tmp_path / "pipe")
    assert not is_routing(tmp_path / "pipe")


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_links_in_a_circle_are_told(tmp_path: Path, read: Callable[[Path], object]) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(UserError, match="Too many levels of symbolic links"):
        read(tmp_path / "a")
    with pytest.raises(OSError, match="Too many levels of symbolic links"):
        write_text_atomically(tmp_path / "a", "text")
    with pytest.raises(UserError, match="Too many levels of symbolic links"):
        registry_path(tmp_path / "a")
    assert (tmp_path / "a").is_symlink() and len(list(tmp_path.iterdir())) == 2


def test_whole_numbers_beyond_all_floats_are_told() -> None:
    with pytest.raises(ValueError, match="is a number beyond all use, not float"):
        from_json(Forecast, {"strategy": "x", "first_token": 10**400, "rate": 1, "round_seconds": 1})
    keys = Keys({"m.rope.freq_base": 10**400}, "file", "m.")
    with pytest.raises(UserError, match=r"m\.rope\.freq_base is beyond all use, where models have"):
        keys.real("rope.freq_base", span=FACTORS)


def test_what_killed_writers_left_is_removed_by_the_next_one(tmp_path: Path) -> None:
    old, new, other = (tmp_path / name for name in (".r.json.abc.tmp", ".r.json.def.tmp", ".other.json.abc.tmp"))
    for path in (old, new, other):
        path.write_text("half")
    for path in (old, other):
        os.utime(path, (0, time.time() - STALE_SECONDS - 5))
    write_text_atomically(tmp_path / "r.json", "text")
    assert not old.exists() and new.exists() and other.exists()  # who writes now is not disturbed


def test_who_waits_for_a_stopped_writer_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(file_lock, "QUIET_SECONDS", 0.1)
    monkeypatch.setattr(file_lock, "LOCK_SECONDS", 0.3)
    place, path = tmp_path / ".r.json.lock", tmp_path / "r.json"
    with subprocess.Popen([sys.executable, "-c", HOLDER, place], stdout=subprocess.PIPE) as holder:
        assert holder.stdout and holder.stdout.readline() == b"held\n"
        os.kill(holder.pid, signal.SIGSTOP)
        try:
            with pytest.raises(UserError, match=r"has held the lock of .*r\.json for 0 s; end it"), hold_lock(path):
                pass
        finally:
            holder.kill()
    said = capsys.readouterr().err
    assert said.startswith("note: ") and "holds the lock of" in said and said.count("\n") == 1
    if "another process" not in said:  # the system tells who it is
        assert f"process {holder.pid}, which is stopped," in said
    with hold_lock(path):
        pass
    assert capsys.readouterr().err == ""


def test_a_profile_of_something_beyond_all_sizes_is_told(tmp_path: Path) -> None:
    path = write_profile(tmp_path / "profile.json")
    edit_json(path, "experts", 0, "experts", value=1 << 63)
    with pytest.raises(UserError, match=r"experts\[0\]\.experts is 9223372036854775808, not 1 or more, and at most"):
        load_profile(path)


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="needs a folder that takes no files even from root")
def test_a_folder_that_takes_no_lock_file_is_named_and_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pshard.file_lock.QUIET_SECONDS", 0.1)
    place = Path("/proc/self/.packed.lock")
    told = "no lock file can be made in /proc/self; name another folder"
    with pytest.raises(UserError, match=told), wait_for_lock(place, "a packed file"):
        pass
