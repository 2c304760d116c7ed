"""The C++ library is missing, of another interface, or of other sources: what is said, and that it is said."""

import os
import sys
import zlib
from pathlib import Path

import pytest
from warm_python import run_warm

from pshard.profile.identify import identify_host
from pshard.runtime.build_executor import choose_kernels
from pshard.runtime.devices.device import open_device
from pshard.runtime.kernels.cpu import native
from pshard.runtime.kernels.cpu.sources import digest_sources

MAKERS = Path(__file__).resolve().parents[1] / "makers"
INTERFACES = {36: 0xD93A42AD}  # ABI -> digest of what native.py calls


def test_a_library_that_is_not_there_or_no_library(tmp_path: Path) -> None:
    functions, why = native.open_library(tmp_path / "_native.so")
    assert not functions and why is not None and "was not built" in why and "pip install" in why
    (tmp_path / "_native.so").write_bytes(b"not a library")
    functions, why = native.open_library(tmp_path / "_native.so")
    assert not functions and why is not None and "cannot be loaded" in why


def test_a_system_that_the_library_is_not_for_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert native.open_library(tmp_path / "_native.so") == ({}, "the C++ kernels are for Linux, and this is darwin")


def test_a_library_without_our_interface_number(tmp_path: Path) -> None:
    import numpy.random.mtrand as other

    functions, why = native.open_library(Path(other.__file__))
    assert not functions and why is not None
    assert f"is of interface 0 and this version calls {native.ABI}: run pip install" in why


@pytest.mark.skipif(not native.is_available(), reason=f"no native library: {native.why_missing()}")
def test_a_library_of_other_sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(native, "_PATH", tmp_path / "_native.so")
    assert native.why_stale() is None  # an installed package has no sources
    monkeypatch.setattr(native, "_PATH", tmp_path / "clone" / "_native.so")
    (tmp_path / "clone" / "csrc").mkdir(parents=True)
    (tmp_path / "clone" / "csrc" / "api.cpp").write_text("another text")
    said = native.why_stale()
    assert said is not None and "_native.so was built from other sources" in said and "pip install" in said


def test_the_digest_is_of_names_and_contents(tmp_path: Path) -> None:
    seen = {digest_sources(tmp_path)}
    assert seen == {0}
    for name, text in (("a.cpp", "int a;"), ("a.cpp", "int b;"), ("b.h", "int b;"), ("notes.txt", "")):
        (tmp_path / name).write_text(text)
        seen.add(digest_sources(tmp_path))
    assert len(seen) == 4  # the notes are no source


def test_engines_and_profiles_note_a_stale_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "why_stale", lambda: "it is old")
    *_, notes = choose_kernels(open_device("cpu"), "fast", 16)
    assert (notes == ("host kernels: it is old",)) == native.is_available()


def test_engines_and_hosts_name_a_missing_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_WHY_MISSING", "it is gone")
    *_, notes = choose_kernels(open_device("cpu"), "fast", 16)
    assert notes == ("host kernels: torch's, some ten times slower (it is gone); pshard doctor says what to do",)
    assert identify_host(1).kernels == "torch"


def test_ranks_without_the_library_say_once_that_they_sum_by_gloo(tmp_path: Path) -> None:
    imports = "import sys; from pshard.runtime.ranks.start_ranks import start_ranks"
    start = f"{imports}; sys.exit(start_ranks(2, 'rank_program', sys.argv[1:]))"
    path = os.pathsep.join(filter(None, (str(MAKERS), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-P", "-c", start, "sums@no-library", "2", str(tmp_path)]
    done = run_warm(command, os.environ | {"PYTHONPATH": path})
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("note: ranks sum by gloo") == 1 and "(it is gone)" in done.stderr


def test_a_change_of_the_interface_changes_its_number() -> None:
    """Update INTERFACES together with ABI in native.py and pshard_abi in csrc/api.cpp."""
    assert INTERFACES.get(native.ABI) == zlib.crc32(repr(native._SIGNATURES).encode())
