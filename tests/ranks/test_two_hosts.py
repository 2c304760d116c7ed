"""Two hosts made of network namespaces on this machine, one rank each as under `torchrun --nnodes 2`, gloo over TCP.

torchrun itself imports torch on each host: one test starts it, the others fork the ranks (`two_hosts.py`).
"""

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cli_world import RATES, made_up_profile, make_world, world_in
from engines import converse, open_engine
from model_files import write_gguf
from rank_program import partial
from thread_ranks import random_tiers, split_variant
from warm_python import run_warm

from pshard.commands import cli_plan, cli_run
from pshard.jsonio import to_json
from pshard.machine import CollectiveTiming
from pshard.profile.identify import identify_accelerators
from pshard.registries.profile_store import load_profile, save_profile
from pshard.reserve import TORCH_RESERVE_MIB
from pshard.runtime.ranks.network import interface_to
from pshard.workload import Split

MAKERS = Path(__file__).resolve().parents[1] / "makers"


def why_not(more: str = "true") -> str | None:
    """Why this machine cannot make the two hosts; `more`: what else must work on their cable."""
    try:
        probe = ["unshare", "-Urn", "sh", "-c", f"ip link add cable0 type veth peer name cable1 && {more}"]
        done = subprocess.run(probe, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return None if done.returncode == 0 else f"no network namespaces: {done.stderr.strip()[:100]}"


REASON = why_not()
needs_namespaces = pytest.mark.skipif(REASON is not None, reason=str(REASON))
NO_LIMIT = REASON or why_not("tc qdisc add dev cable0 root tbf rate 10gbit burst 4mb latency 50ms")
needs_limit = pytest.mark.skipif(NO_LIMIT is not None, reason=f"no limited cable: {NO_LIMIT}")
needs_two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
RATE = 10e9 / 8  # bytes a second of such a cable


def run_two_hosts(
    what: str, folder: Path, limit: str = "", cut: bool = False, gpus: bool = False, torchrun: bool = False
) -> tuple[list[str], str, str]:
    """Exit codes and what was printed on two hosts; in `what` runs on both, HOST is a host's number.

    limit: rate of their cable. cut: it is cut when the file `pid` is there; instead of the codes the times when it was
    and when both had said so. gpus: each host has one. torchrun: it starts the ranks.
    """
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "GLOO_SOCKET_IFNAME")}
    asked = {"what": what, "folder": str(folder), "limit": limit, "cut": cut, "gpus": gpus}
    words = [sys.executable, str(MAKERS / "two_hosts.py"), json.dumps(asked | {"torchrun": torchrun or gpus})]
    path = os.pathsep.join(filter(None, (str(MAKERS), os.environ.get("PYTHONPATH"))))
    done = run_warm(words, environment | {"PYTHONPATH": path}, timeout=200 if gpus else 110)
    logs = [(folder / f"{host}.log").read_text() for host in (0, 1)]
    assert done.returncode == 0, done.stderr
    return done.stdout.split(), logs[0], logs[1]


def run_scenario(scenario: str, folder: Path, **more: bool) -> tuple[list[str], str, str]:
    """The same with a scenario of `rank_program.py`."""
    return run_two_hosts(f"{MAKERS / 'rank_program.py'} {scenario} 2 {folder}", folder, **more)


@pytest.mark.slow
@needs_namespaces
def test_two_hosts_share_no_memory_find_the_cable_and_sum_to_the_same_bits(tmp_path: Path) -> None:
    codes, first, second = run_scenario("network+sums", tmp_path, torchrun=True)
    assert codes == ["0", "0"], first + second
    for host in (0, 1):
        assert (tmp_path / f"network-{host}").read_text() == f"gloo cable{host}"
    mine, theirs = (torch.load(tmp_path / f"sums-{rank}.pt") for rank in (0, 1))
    for a, b in zip(mine, theirs, strict=True):
        assert torch.equal(a, b)
        wanted = sum(partial(r, tuple(a.shape)).double() for r in (0, 1))
        torch.testing.assert_close(a.double(), wanted, rtol=1e-5, atol=1e-4)


@pytest.mark.slow
@needs_namespaces
@pytest.mark.parametrize("mode", ["layer", "tensor"])
def test_two_hosts_give_the_logits_of_one(mode: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "qwen3", qtype="Q8_0", n_layers=3)
    with open_engine(path, context=256, tokens=(4, 16)) as one:
        wanted = converse(one)
    variant = split_variant(path, Split(mode, (1.0, 2.0), ()), 256, random_tiers(5, 256))
    (tmp_path / "plan.json").write_text(json.dumps(to_json(variant)))
    codes, first, second = run_scenario("engine", tmp_path)
    assert codes == ["0", "0"], first + second
    mine, theirs = (torch.load(tmp_path / f"engine-{rank}.pt") for rank in (0, 1))
    assert torch.equal(mine, theirs)
    assert torch.equal(mine, wanted) or mode == "tensor"
    assert float(((mine - wanted) ** 2).sum() / (wanted**2).sum()) < 1e-10


@pytest.mark.slow
@needs_limit
def test_sums_timed_between_two_hosts_make_auto_choose_layers(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    world, both = make_world(tmp_path), tmp_path / "both-0.json"
    on_one = tuple(CollectiveTiming("shm", 2, n, 5e-6 + n / 5e9) for n in (4 << 10, 16 << 20))
    rates = replace(RATES, acc_memory=6e9, link=1e8, host_memory=1e8, host_flops=2e9)  # one alone streams for long
    save_profile(replace(made_up_profile(rates), collectives=on_one), world.profile)
    auto = ["-m", str(world.model), "--vram", f"{world.budget},{world.budget}", "-sm", "auto", "--profile"]

    def chosen(profile: Path) -> str:
        assert cli_plan.main([*auto, str(profile), "-c", "256", "--json"]) == 0
        return json.loads(capfd.readouterr().out)["registry"]["sets"][0]["variants"][0]["considered"][0]["way"]

    assert chosen(world.profile).startswith("-sm tensor")
    profile = f"-m pshard.commands.cli_profile --quick -o {tmp_path}/both-HOST.json"
    codes, first, second = run_two_hosts(profile, tmp_path, "10gbit")
    assert codes == ["0", "0"], first + second
    assert both.read_bytes() == (tmp_path / "both-1.json").read_bytes()
    timed = {c.nbytes: c for c in load_profile(both).collectives}
    assert {(c.backend, c.ranks) for c in timed.values()} == {("gloo", 2)}
    assert timed[16 << 20].seconds > 0.95 * (16 << 20) / RATE  # each host's part crosses the cable
    assert chosen(both).startswith("-sm layer")
    as_on_one = tmp_path / "as-on-one.json"
    save_profile(replace(load_profile(both), collectives=on_one, ranks_per_host=0), as_on_one)
    assert chosen(as_on_one).startswith("-sm tensor")  # so it was the sums

    ask = ["-p", "1,2,3", "-n", "6", "--temp", "0", "--tokens"]
    run = " ".join(["-m pshard.commands.cli_run", *auto, f"{tmp_path}/both-HOST.json", *ask])
    codes, first, second = run_two_hosts(run, tmp_path, "10gbit")
    assert codes == ["0", "0"], first + second
    assert cli_plan.main(["-m", str(world.model), "--vram", str(world.roomy), "-c", "256"]) == 0
    capfd.readouterr()
    assert cli_run.main(["-m", str(world.model), "--vram", str(world.roomy), *ask]) == 0
    assert capfd.readouterr().out.strip() in [line.strip() for line in first.splitlines()]


@pytest.mark.slow
@needs_namespaces
def test_what_keeps_hosts_from_being_profiled_is_said_on_both(tmp_path: Path) -> None:
    codes, first, second = run_two_hosts(f"-m pshard.commands.cli_profile -o {tmp_path}/p.json", tmp_path)
    assert "0" not in codes and not (tmp_path / "p.json").exists()
    for said in (first, second):
        assert "error: rank 0 on " in said and "no machine profile at" in said


@pytest.mark.slow
@needs_namespaces
def test_a_rank_that_dies_on_the_other_host_is_named_within_seconds(tmp_path: Path) -> None:
    start = time.monotonic()
    codes, first, _ = run_scenario("crash", tmp_path)
    assert "0" not in codes
    assert "rank 1 died: it ended without a word" in first
    assert time.monotonic() - start < 60


@pytest.mark.slow
@needs_namespaces
def test_a_dead_host_is_named_within_five_seconds(tmp_path: Path) -> None:
    (cut, named), first, second = run_scenario("keep_summing", tmp_path, cut=True)
    assert "stops: rank 1 died: its " in first  # host has not answered, or its connection broke
    assert "stops: rank 0 died: its " in second  # and with it the store, where ranks meet
    assert float(named) - float(cut) < 5.0, first


@pytest.mark.gpu
@needs_two_gpus
@needs_limit
def test_gpus_of_two_hosts_sum_over_sockets_and_their_sums_are_timed(tmp_path: Path) -> None:
    codes, first, second = run_scenario("gpu_sums@nccl", tmp_path, gpus=True)
    assert codes == ["0", "0"], first + second
    assert "NET/Socket" in first and "NET/Socket" in second  # not memory that they share, as they are on one host
    mine, theirs = (torch.load(tmp_path / f"gpu_sums-{rank}.pt") for rank in (0, 1))
    for (shape, dtype, algorithm, sums), (*_, others) in zip(mine, theirs, strict=True):
        wanted = sum(partial(rank, shape).double() for rank in (0, 1))
        found = float(((sums[0].double() - wanted) ** 2).sum() / (wanted**2).sum())
        assert algorithm == "nccl" and torch.equal(sums, others)
        assert found < {"f32": 1e-13, "bf16": 3e-5, "f16": 5e-7}[dtype], (shape, dtype, found)

    base = replace(made_up_profile(), accelerators=identify_accelerators("cuda")[:1])
    save_profile(base, world_in(tmp_path).profile)
    profile = f"-m pshard.commands.cli_profile --quick --device cuda -o {tmp_path}/both-HOST.json"
    codes, first, second = run_two_hosts(profile, tmp_path, "10gbit", gpus=True)
    assert codes == ["0", "0"], first + second
    timed = {(c.nbytes, c.dtype): c for c in load_profile(tmp_path / "both-0.json").collectives if not c.copies}
    assert {(c.backend, c.ranks) for c in timed.values()} == {("nccl", 2)}
    assert timed[16 << 20, "f32"].seconds > 0.95 * (16 << 20) / RATE
    assert timed[16 << 20, "bf16"].seconds < timed[16 << 20, "f32"].seconds  # half of the bytes cross the cable


@pytest.mark.gpu
@needs_two_gpus
@needs_namespaces
@pytest.mark.parametrize("mode", ["layer", "tensor"])
def test_gpus_of_two_hosts_give_the_logits_of_one(mode: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "qwen3", qtype="Q4_0", n_layers=4)
    with open_engine(path, context=256, tokens=(4, 16)) as one:
        wanted = converse(one)
    variant = split_variant(path, Split(mode, (1.0, 1.0), ()), 256, random_tiers(5, 256), TORCH_RESERVE_MIB)
    (tmp_path / "plan.json").write_text(json.dumps(to_json(variant)))
    codes, first, second = run_scenario("engine@nccl", tmp_path, gpus=True)
    assert codes == ["0", "0"], first + second
    mine, theirs = (torch.load(tmp_path / f"engine-{rank}.pt") for rank in (0, 1))
    assert torch.equal(mine, theirs)
    assert float(((mine - wanted) ** 2).sum() / (wanted**2).sum()) < 2e-3  # int8 activations, bfloat16 on the GPU


@pytest.mark.gpu
@needs_two_gpus
@needs_namespaces
def test_a_gpu_whose_host_is_dead_is_named_within_five_seconds(tmp_path: Path) -> None:
    (cut, named), first, second = run_scenario("keep_summing_on_gpu@nccl", tmp_path, cut=True, gpus=True)
    assert "stops: rank 1 died: its " in first and "stops: rank 0 died: its " in second
    assert float(named) - float(cut) < 5.0, first


def test_the_interface_to_this_machine_is_the_loopback() -> None:
    if not Path("/proc/net/route").exists():
        pytest.skip("interfaces are asked for in Linux's way")
    assert interface_to("127.0.0.1", 1) == "lo"
    assert interface_to("not an address", 1) is None
