"""Identification of this machine, and where the limits of the process are taken from."""

import os

import pytest

from pshard.errors import UserError
from pshard.profile import identify
from pshard.profile.identify import count_cores, identify_accelerators, identify_host, last_cache_bytes, usable_memory


def test_host_says_what_it_is():
    host = identify_host(threads=1)
    assert host.cpu and host.isa
    assert host.kernels in ("native", "torch")
    assert 1 <= host.cores <= (os.cpu_count() or 1)
    assert host.numa_nodes >= 1 and host.threads == 1
    assert host.memory_bytes == usable_memory() > 1 << 28
    assert host.l3_bytes == dict(host.caches).get("L3", 0)
    assert last_cache_bytes() == max((n for _, n in host.caches), default=0)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no CPU affinity on this system")
def test_cores_follow_the_affinity():
    allowed = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(allowed)})
        assert count_cores() == 1
    finally:
        os.sched_setaffinity(0, allowed)


@pytest.mark.parametrize(
    "files, quota",
    [
        ({"cpu.max": "max 100000"}, None),
        ({"cpu.max": "150000 100000"}, 1.5),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ({"cpu/cpu.cfs_quota_us": "400000", "cpu/cpu.cfs_period_us": "100000"}, 4.0),
    ],
)
def test_cgroup_quota(monkeypatch, files, quota):
    monkeypatch.setattr(identify, "_cgroup_values", lambda name: [files[name]] if name in files else [])
    assert identify._cgroup_quota() == quota


def test_cgroup_values_come_from_every_group_above(monkeypatch):
    files = {
        "/proc/self/cgroup": "0::/a/b\n",
        "/sys/fs/cgroup/a/b/cpu.max": "max 100000\n",
        "/sys/fs/cgroup/a/cpu.max": "200000 100000\n",
    }
    monkeypatch.setattr(identify, "_read_text", lambda path: files.get(str(path), ""))
    assert identify._cgroup_values("cpu.max") == ["max 100000", "200000 100000"]
    assert identify._cgroup_quota() == 2.0


def test_the_cpu_is_an_accelerator_of_its_own_kind():
    (acc,) = identify_accelerators("cpu")
    assert (acc.kind, acc.index) == ("cpu", 0)
    assert acc.memory_bytes == usable_memory()


def test_an_unknown_accelerator_is_refused():
    with pytest.raises(UserError, match="choose cuda or cpu"):
        identify_accelerators("tpu")


@pytest.mark.parametrize(
    ("built", "mend"), [(None, "install a CUDA build of torch"), ("13.0", "nvidia-smi lists a GPU")]
)
def test_without_a_gpu_torch_is_blamed_only_where_it_was_built_without_cuda(
    built: str | None, mend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.version.cuda", built)
    with pytest.raises(UserError, match=f"torch sees no GPU here; use --device cpu, or .*{mend}"):
        identify_accelerators("cuda")


@pytest.mark.parametrize("limit", ["memory.max", "memory.high"])
def test_the_lowest_limit_of_a_control_group_above_is_all_there_is(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Above memory.high a process is slowed down until it stands still."""
    limits = {limit: ["max", str(1 << 28), str(1 << 30)]}
    monkeypatch.setattr("pshard.profile.identify._cgroup_values", lambda name: limits.get(name, ["max"]))
    assert usable_memory() == 1 << 28
