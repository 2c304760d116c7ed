"""Ranks on NUMA nodes: cores that stay on their node, and memory that is really bound to it."""

import ctypes
import json
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pshard.runtime.devices.numa import (
    NODES,
    Place,
    _parse_list,
    format_list,
    place_rank,
    read_nodes,
    read_pci_node,
    read_siblings,
    spread_over_cores,
)

TWO = {0: (0, 1, 2, 3), 1: (4, 5, 6, 7)}


def test_nodes_are_read_as_the_system_lists_them(tmp_path: Path) -> None:
    for node, text in ((0, "0-2,8\n"), (1, "3,4-5\n"), (2, "\n")):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(text)
    assert read_nodes(tmp_path) == {0: (0, 1, 2, 8), 1: (3, 4, 5)}
    assert read_nodes(tmp_path / "none") == {}


@pytest.mark.parametrize(
    ("ranks", "places"),
    [
        (1, [Place(tuple(range(8)), (0, 1))]),
        (2, [Place((0, 1, 2, 3), (0,)), Place((4, 5, 6, 7), (1,))]),
        (3, [Place((0, 1), (0,)), Place((2, 3), (0,)), Place((4, 5, 6, 7), (1,))]),
        (4, [Place((0, 1), (0,)), Place((2, 3), (0,)), Place((4, 5), (1,)), Place((6, 7), (1,))]),
    ],
)
def test_no_share_crosses_a_node(ranks: int, places: list[Place]) -> None:
    assert [place_rank(r, ranks, range(8), TWO, {}) for r in range(ranks)] == places


def test_fewer_ranks_than_nodes_take_whole_nodes() -> None:
    nodes = {n: (2 * n, 2 * n + 1) for n in range(4)}
    assert [place_rank(r, 2, range(8), nodes, {}).nodes for r in range(2)] == [(0, 1), (2, 3)]


def test_only_usable_cores_are_given_and_shared_when_they_are_few() -> None:
    assert place_rank(1, 2, (1, 2, 5), TWO, {}) == Place((5,), (1,))
    assert [place_rank(r, 3, (6,), TWO, {}).cores for r in range(3)] == [(6,)] * 3


def test_without_nodes_the_cores_are_divided() -> None:
    assert [place_rank(r, 2, (3, 1, 2, 0), {}, {}) for r in range(2)] == [Place((0, 1), ()), Place((2, 3), ())]


FAR = {cpu: cpu % 4 for cpu in range(8)}  # as Linux numbers them: the second processors after all first ones
NEAR = {cpu: cpu // 2 * 2 for cpu in range(8)}  # as many virtual machines do


def test_siblings_are_read_as_the_system_lists_them(tmp_path: Path) -> None:
    for cpu, text in ((0, "0,2\n"), (1, "1,3\n"), (2, "0,2\n"), (3, "1,3\n")):
        (tmp_path / f"cpu{cpu}" / "topology").mkdir(parents=True)
        (tmp_path / f"cpu{cpu}" / "topology" / "thread_siblings_list").write_text(text)
    assert read_siblings(tmp_path) == {0: 0, 1: 1, 2: 0, 3: 1}
    assert read_siblings(tmp_path / "none") == {}


@pytest.mark.parametrize(
    ("near", "cores"),
    [
        ((0, 1), [(0, 1, 2, 3), (4, 5, 6, 7)]),
        ((1, 0), [(4, 5, 6, 7), (0, 1, 2, 3)]),
        ((1, 1), [(4, 5), (6, 7)]),  # never the other socket's
        ((1, 0, 1), [(4, 5), (0, 1, 2, 3), (6, 7)]),
        ((-1, -1), [(0, 1, 2, 3), (4, 5, 6, 7)]),  # not known
        ((2, 0), [(0, 1, 2, 3), (4, 5, 6, 7)]),  # of a node without processors for us
    ],
)
def test_ranks_get_the_node_of_their_gpu(near: tuple[int, ...], cores: list[tuple[int, ...]]) -> None:
    places = [place_rank(r, len(near), range(8), TWO, {}, near) for r in range(len(near))]
    assert [place.cores for place in places] == cores
    assert [place.nodes for place in places] == [(0,) if min(c) < 4 else (1,) for c in cores]


def test_the_node_of_a_pci_device(tmp_path: Path) -> None:
    place = tmp_path / "0001:8a:00.0"
    place.mkdir()
    assert read_pci_node("0001:8a:00.0", tmp_path) == -1
    (place / "numa_node").write_text("1\n")
    assert read_pci_node("0001:8a:00.0", tmp_path) == read_pci_node("00000001:8A:00.0", tmp_path) == 1
    assert read_pci_node("0000:8a:00.0", tmp_path) == -1


@pytest.mark.parametrize("numbers", [(), (3,), (0, 1), (8, 0, 1, 2), (1, 3, 4, 9)])
def test_a_list_is_written_as_it_is_read(numbers: tuple[int, ...]) -> None:
    assert _parse_list(format_list(numbers)) == tuple(sorted(numbers))
    assert format_list((8, 0, 1, 2)) == "0-2,8"


@pytest.mark.parametrize("siblings", [FAR, NEAR])
def test_ranks_have_physical_cores_of_their_own(siblings: dict[int, int]) -> None:
    shares = [place_rank(r, 2, range(8), {0: range(8)}, siblings).cores for r in range(2)]
    first, second = ({siblings[cpu] for cpu in cores} for cores in shares)
    assert sorted(shares[0] + shares[1]) == list(range(8)) and not first & second


@pytest.mark.parametrize(
    ("siblings", "cpus", "order"),
    [(FAR, range(8), [0, 1, 2, 3, 4, 5, 6, 7]), (NEAR, range(8), [0, 2, 4, 6, 1, 3, 5, 7]),
     (FAR, (0, 1, 4, 5), [0, 1, 4, 5]), (NEAR, (2, 3, 5), [2, 5, 3]), ({}, (3, 1), [1, 3])],
)  # fmt: skip
def test_threads_take_physical_cores_before_their_second_processors(
    siblings: dict[int, int], cpus: range | tuple[int, ...], order: list[int]
) -> None:
    assert spread_over_cores(cpus, siblings) == order


PROGRAM = """
import ctypes, json, sys
from pshard.runtime.devices.numa import bind_memory, read_nodes
why = bind_memory([max(read_nodes())], sys.argv[1] == "spill")
mode, mask = ctypes.c_int(-1), (ctypes.c_ulong * 16)()
ctypes.CDLL(None).syscall(ctypes.c_long(239), ctypes.byref(mode), mask, ctypes.c_ulong(1024), None, ctypes.c_ulong(0))
print(json.dumps([why, mode.value, mask[0], max(read_nodes())]))
"""


@pytest.mark.skipif(platform.machine() != "x86_64" or not NODES.is_dir(), reason="asks Linux on x86-64 for its policy")
@pytest.mark.parametrize("spill", ["", "spill"])
def test_memory_is_bound_as_the_system_itself_says(spill: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, spill], capture_output=True, text=True, timeout=60, check=True
    )
    why, mode, mask, node = json.loads(done.stdout)
    if why is not None:
        pytest.skip(f"this system refuses: {why}")
    release = tuple(int(n) for n in re.findall(r"\d+", platform.release())[:2])
    assert (mode, mask) == (5 if spill and release >= (5, 15) else 2, 1 << node)
    assert ctypes.sizeof(ctypes.c_ulong) == 8
