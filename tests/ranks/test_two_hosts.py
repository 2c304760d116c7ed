"""Two hosts made of network namespaces on this machine, one rank each under `torchrun --nnodes 2`, gloo over TCP."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from engines import converse, open_engine
from model_files import write_gguf
from rank_program import partial
from thread_ranks import random_tiers, split_variant

from pshard.jsonio import to_json
from pshard.runtime.ranks.network import interface_to
from pshard.workload import Split

MAKERS = Path(__file__).resolve().parents[1] / "makers"
# Host A is the namespace that this script runs in, host B that of a sleeping process; a cable between them.
SCRIPT = """
set -e
ip link set lo up
ip link add cable0 type veth peer name cable1
unshare -n sleep 300 & other=$!
trap 'kill $other' EXIT
until [ "$(readlink /proc/$other/ns/net)" != "$(readlink /proc/self/ns/net)" ]; do sleep 0.05; done
ip link set cable1 netns $other
on_b="nsenter --net=/proc/$other/ns/net --"
ip address add 10.77.0.1/24 dev cable0
ip link set cable0 up
$on_b ip link set lo up
$on_b ip address add 10.77.0.2/24 dev cable1
$on_b ip link set cable1 up
run() { "$PYTHON" -P -m torch.distributed.run --nnodes 2 --node-rank $1 --nproc-per-node 1 \\
  --master-addr 10.77.0.1 --master-port 29577 "$PROGRAM" "$SCENARIO" 2 "$FOLDER" >"$FOLDER/$1.log" 2>&1; }
export PYTHON PROGRAM SCENARIO FOLDER
export -f run
run 0 & first=$!
code_b=0; $on_b bash -c 'run 1' || code_b=$?
code_a=0; wait $first || code_a=$?
echo "$code_a $code_b"
"""


def why_not() -> str | None:
    """Why this machine cannot make the two hosts."""
    try:
        probe = ["unshare", "-Urn", "sh", "-c", "ip link add cable0 type veth peer name cable1"]
        done = subprocess.run(probe, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return None if done.returncode == 0 else f"no network namespaces: {done.stderr.strip()[:100]}"


REASON = why_not()
needs_namespaces = pytest.mark.skipif(REASON is not None, reason=str(REASON))


def run_two_hosts(scenario: str, folder: Path) -> tuple[list[str], str, str]:
    """Exit codes and what the hosts' commands printed."""
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "GLOO_SOCKET_IFNAME")}
    environment |= {
        "PYTHON": sys.executable,
        "PYTHONPATH": str(MAKERS),
        "PROGRAM": str(MAKERS / "rank_program.py"),
        "SCENARIO": scenario,
        "FOLDER": str(folder),
    }
    command = ["unshare", "-Urn", "--fork", "--kill-child", "bash", "-c", SCRIPT]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=110)
    logs = [(folder / f"{host}.log").read_text() for host in (0, 1)]
    assert done.returncode == 0, done.stderr
    return done.stdout.split(), logs[0], logs[1]


@pytest.mark.slow
@needs_namespaces
def test_sums_between_two_hosts_are_the_same_bits(tmp_path: Path) -> None:
    codes, first, second = run_two_hosts("sums", tmp_path)
    assert codes == ["0", "0"], first + second
    mine, theirs = (torch.load(tmp_path / f"sums-{rank}.pt") for rank in (0, 1))
    for a, b in zip(mine, theirs, strict=True):
        assert torch.equal(a, b)
        wanted = sum(partial(r, tuple(a.shape)).double() for r in (0, 1))
        torch.testing.assert_close(a.double(), wanted, rtol=1e-5, atol=1e-4)


@pytest.mark.slow
@needs_namespaces
def test_hosts_do_not_share_memory_and_find_the_cable(tmp_path: Path) -> None:
    codes, first, second = run_two_hosts("network", tmp_path)
    assert codes == ["0", "0"], first + second
    assert (tmp_path / "network-0").read_text() == "gloo cable0"
    assert (tmp_path / "network-1").read_text() == "gloo cable1"


@needs_namespaces
@pytest.mark.parametrize("mode", [pytest.param("layer", marks=pytest.mark.slow), "tensor"])
def test_two_hosts_give_the_logits_of_one(mode: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "qwen3", qtype="Q8_0", n_layers=3)
    with open_engine(path, context=256, tokens=(4, 16)) as one:
        wanted = converse(one)
    variant = split_variant(path, Split(mode, (1.0, 2.0), ()), 256, random_tiers(5, 256))
    (tmp_path / "plan.json").write_text(json.dumps(to_json(variant)))
    codes, first, second = run_two_hosts("engine", tmp_path)
    assert codes == ["0", "0"], first + second
    mine, theirs = (torch.load(tmp_path / f"engine-{rank}.pt") for rank in (0, 1))
    assert torch.equal(mine, theirs)
    assert torch.equal(mine, wanted) or mode == "tensor"
    assert float(((mine - wanted) ** 2).sum() / (wanted**2).sum()) < 1e-10


@pytest.mark.slow
@needs_namespaces
def test_a_rank_that_dies_on_the_other_host_is_named_within_seconds(tmp_path: Path) -> None:
    start = time.monotonic()
    codes, first, _ = run_two_hosts("crash", tmp_path)
    assert "0" not in codes
    assert "rank 1 died or hangs" in first
    assert time.monotonic() - start < 60


def test_the_interface_to_this_machine_is_the_loopback() -> None:
    if not Path("/proc/net/route").exists():
        pytest.skip("interfaces are asked for in Linux's way")
    assert interface_to("127.0.0.1", 1) == "lo"
    assert interface_to("not an address", 1) is None
