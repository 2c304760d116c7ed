"""Two hosts of one machine: network namespaces with a cable between them, and a rank on each, as under torchrun.

    python two_hosts.py '{"what": "-m MODULE --host HOST", "folder": "/tmp/x"}'

A process that has imported torch forks both ranks (`warm_python.py`), so that they need not. Prints their exit codes.
"""

import ctypes
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from warm_python import ForkedChild

NEW_USER, NEW_NETWORK = 0x10000000, 0x40000000  # CLONE_NEWUSER, CLONE_NEWNET
NETWORK = "/proc/self/ns/net"
GOES_ON = 1.5  # seconds before the cable is cut


def call_system(name: str, *arguments: int) -> None:
    """A function of the C library that Python 3.11 lacks."""
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments):
        raise OSError(ctypes.get_errno(), name)


def be_root_of_a_network() -> None:
    """This process has a network of its own, and rights over it that a user has."""
    user, group = os.getuid(), os.getgid()
    call_system("unshare", NEW_USER | NEW_NETWORK)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {user} 1")
    Path("/proc/self/gid_map").write_text(f"0 {group} 1")


@contextmanager
def on_host_b(network: int) -> Iterator[None]:
    """What is done and started meanwhile is on host B."""
    here = os.open(NETWORK, os.O_RDONLY)
    call_system("setns", network, NEW_NETWORK)
    yield
    call_system("setns", here, NEW_NETWORK)
    os.close(here)


def change_network(*commands: str) -> None:
    for command in commands:
        subprocess.run(command.split(), check=True)


def lay_cable(limit: str) -> int:
    """Host A is this process's network; returns that of host B, at the other end. limit: the cable's rate."""
    limited = [f"tc qdisc add dev cableN root tbf rate {limit} burst 4mb latency 50ms"] if limit else []
    host_a = os.open(NETWORK, os.O_RDONLY)
    call_system("unshare", NEW_NETWORK)
    host_b = os.open(NETWORK, os.O_RDONLY)
    lay = ["ip link set lo up", "ip address add 10.77.0.N/24 dev cableN", "ip link set cableN up", *limited]
    change_network(f"ip link add cable1 type veth peer name cable0 netns /proc/{os.getpid()}/fd/{host_a}")
    change_network(*(command.replace("10.77.0.N", "10.77.0.2").replace("cableN", "cable1") for command in lay))
    call_system("setns", host_a, NEW_NETWORK)
    change_network(*(command.replace("10.77.0.N", "10.77.0.1").replace("cableN", "cable0") for command in lay))
    return host_b


def start_rank(rank: int, asked: dict[str, Any]) -> ForkedChild | subprocess.Popen:
    """What is asked, on the host where this process is now. torchrun, and ranks with GPUs, are no forks."""
    place = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    place |= {"MASTER_ADDR": "10.77.0.1", "MASTER_PORT": 29577}  # as torchrun does
    if asked["gpus"]:  # one for each; to NCCL they are of two hosts, between which there are sockets
        place |= {"CUDA_VISIBLE_DEVICES": rank, "NCCL_HOSTID": f"host{rank}", "NCCL_IB_DISABLE": 1}
        place |= {"NCCL_DEBUG": "INFO"}
    torchrun = f"-m torch.distributed.run --nnodes 2 --node-rank {rank} --nproc-per-node 1 --master-addr 10.77.0.1"
    words = f"{torchrun} --master-port 29577".split() if asked["torchrun"] else []
    words += asked["what"].replace("HOST", str(rank)).split()
    start = subprocess.Popen if asked["torchrun"] else ForkedChild
    environment = os.environ | {name: str(value) for name, value in place.items()}
    with open(Path(asked["folder"]) / f"{rank}.log", "wb") as log:
        return start([sys.executable, "-P", *words], env=environment, stdout=log, stderr=log)


def cut_cable(folder: Path, network: int, ranks: Sequence[ForkedChild | subprocess.Popen]) -> tuple[float, float]:
    """When it was cut, as if host B were dead, and when both ranks had said so."""
    while not (folder / "pid").exists():
        time.sleep(0.1)
        if any(rank.poll() is not None for rank in ranks):
            sys.exit("a rank ended before it had summed:\n" + (folder / "0.log").read_text()[-2000:])
    time.sleep(GOES_ON)
    cut = time.time()
    with on_host_b(network):
        change_network("ip link set cable1 down")
    while not all("\nerror: " in "\n" + (folder / f"{rank}.log").read_text() for rank in (0, 1)):
        time.sleep(0.05)
    return cut, time.time()


def main() -> None:
    asked = json.loads(sys.argv[1])
    be_root_of_a_network()
    network = lay_cable(asked["limit"])
    ranks = [start_rank(0, asked)]
    with on_host_b(network):
        ranks.append(start_rank(1, asked))
    if asked["cut"]:
        print(*cut_cable(Path(asked["folder"]), network, ranks))
        for rank in ranks:
            rank.kill()
    codes = [rank.wait() for rank in ranks]
    if not asked["cut"]:
        print(*codes)


if __name__ == "__main__":
    main()
