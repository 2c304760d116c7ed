"""Plans that must not change by accident: each case is a model, a machine, a workload and a way to plan it."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from golden.machines import find_machine
from golden.shapes import make_shape

from pshard.machine import AcceleratorInfo, MachineProfile
from pshard.model import ModelSpec
from pshard.plan import NOTHING_LEARNT, Correction, Factor, Variant
from pshard.planner.choose_mode import plan_split
from pshard.planner.make_plan import plan_baseline, plan_several, plan_variant
from pshard.planner.prepare_ranks import prepare_ranks
from pshard.workload import Workload

NEVER = 1e4  # seconds: no limit of the solver is met, however busy the machine is


@dataclass(frozen=True)
class Case:
    """`how`: "plan", "auto" (ratios), "several", or the name of a published strategy."""

    name: str
    machine: str
    model: str
    workload: Workload
    qtype: str = "Q4_0"
    how: str = "plan"
    change: Callable[[MachineProfile], MachineProfile] = lambda profile: profile
    correction: Correction = NOTHING_LEARNT

    def plan(self) -> tuple[ModelSpec, MachineProfile, tuple[Variant, ...]]:
        """The model, the machine as it was changed, and the variants. Raises UserError where nothing fits."""
        spec = make_shape(self.model, self.qtype)
        profile = self.change(find_machine(self.machine))
        if self.how == "several":
            (task,) = prepare_ranks(spec, profile, self.workload, self.correction)
            return spec, profile, plan_several(task, NEVER)
        if self.how == "plan" and self.workload.split_mode != "auto":
            return spec, profile, (plan_variant(spec, profile, self.workload, NEVER, self.correction),)
        if self.how in ("plan", "auto"):
            return spec, profile, (plan_split(spec, profile, self.workload, self.how == "auto", NEVER),)
        return spec, profile, (plan_baseline(self.how, spec, profile, self.workload),)


def _work(*mib: int, mode: str = "none", **fields) -> Workload:
    return Workload(mib, **{"split_mode": mode, **fields})


def on_cpu(profile: MachineProfile) -> MachineProfile:
    """The same host with its CPU as accelerator."""
    (gpu, *_) = profile.accelerators
    return replace(profile, accelerators=(replace(gpu, kind="cpu", name=profile.host.cpu),))


def _with_lockable(mib: int) -> Callable[[MachineProfile], MachineProfile]:
    return lambda profile: replace(profile, lockable_bytes=mib << 20)


def _with_memory(mib: int) -> Callable[[MachineProfile], MachineProfile]:
    return lambda profile: replace(profile, host=replace(profile.host, memory_bytes=mib << 20))


def _with_devices(count: int) -> Callable[[MachineProfile], MachineProfile]:
    def change(profile: MachineProfile) -> MachineProfile:
        (gpu, *_) = profile.accelerators
        more: list[AcceleratorInfo] = [replace(gpu, index=i) for i in range(count)]
        return replace(profile, accelerators=tuple(more))

    return change


LEARNT = Correction(
    (Factor("acc", "ffn", "small", 1.3), Factor("host", "attention", "small", 0.8), Factor("link", "", "large", 1.2))
)

CASES: tuple[Case, ...] = (
    Case("32b-12000", "h100", "qwen3-32b", _work(12000)),
    Case("32b-6000", "h100", "qwen3-32b", _work(6000)),
    Case("32b-16000", "h100", "qwen3-32b", _work(16000)),
    Case("32b-all-fits", "h100", "qwen3-32b", _work(24000)),
    Case("32b-too-small", "h100", "qwen3-32b", _work(330)),
    Case("32b-long-context", "h100", "qwen3-32b", _work(12000, context=65536, prompt=60000)),
    Case("32b-16-users", "h100", "qwen3-32b", _work(12000, context=32768, sequences=16, prompt=1024)),
    Case("32b-64-users-q8-kv", "h100", "qwen3-32b", _work(
        12000, context=65536, sequences=64, prompt=512, type_k="q8_0", type_v="q8_0")),
    Case("32b-mixed-kv", "h100-sheet", "qwen3-32b", _work(9000, type_k="q8_0", type_v="f16")),
    Case("32b-on-4060", "rtx4060", "qwen3-32b", _work(7000)),
    Case("32b-q8-on-5080", "rtx5080", "qwen3-32b", _work(12000, context=16384, prompt=16000), "Q8_0"),
    Case("32b-q4k-on-5080", "rtx5080", "qwen3-32b", _work(15000), "Q4_K"),
    Case("70b-16000", "h100-sheet", "llama3-70b", _work(16000)),
    Case("70b-host-too-small", "rtx4060", "llama3-70b", _work(7000)),
    Case("70b-host-just-holds", "rtx4060", "llama3-70b", _work(7000), change=_with_memory(44000)),
    Case("70b-two-tensor", "h100-sheet", "llama3-70b", _work(16000, 16000, mode="tensor"), change=_with_devices(2)),
    Case("32b-two-tensor", "h100", "qwen3-32b", _work(6000, 6000, mode="tensor"), change=_with_devices(2)),
    Case("32b-two-layer", "h100", "qwen3-32b", _work(6000, 6000, mode="layer"), change=_with_devices(2)),
    Case("32b-two-unlike", "h100", "qwen3-32b", _work(
        9000, 6000, mode="tensor", tensor_split=(3.0, 2.0)), change=_with_devices(2)),
    Case("32b-four-layer", "h100", "qwen3-32b", _work(5000, 5000, 5000, 5000, mode="layer"), change=_with_devices(4)),
    Case("32b-three-tensor", "h100-sheet", "qwen3-32b", _work(
        6000, 6000, 6000, mode="tensor", max_tp=(("attention", 2),)), change=_with_devices(3)),
    Case("8b-eight-tensor", "h100-sheet", "llama3-8b", _work(*(750,) * 8, mode="tensor"), change=_with_devices(8)),
    Case("8b-rank-with-nothing", "h100-sheet", "llama3-8b", _work(
        3000, 3000, mode="tensor", tensor_split=(1.0, 0.0)), change=_with_devices(2)),
    Case("8b-auto-mode", "h100-sheet", "llama3-8b", _work(
        3000, 2000, mode="auto", max_ubatch=1024), how="auto", change=_with_devices(2)),
    Case("2b-auto-ratios", "rtx4060", "qwen3-2b", _work(
        1000, 700, mode="tensor", max_ubatch=512), how="auto", change=_with_devices(2)),
    Case("30b-a3b-6000", "h100", "qwen3-30b-a3b", _work(6000)),
    Case("30b-a3b-on-4060", "rtx4060", "qwen3-30b-a3b", _work(7000, context=16384, sequences=4)),
    Case("30b-a3b-two-layer", "h100", "qwen3-30b-a3b", _work(5000, 4000, mode="layer"), change=_with_devices(2)),
    Case("30b-a3b-two-tensor", "h100", "qwen3-30b-a3b", _work(6000, 6000, mode="tensor"), change=_with_devices(2)),
    Case("30b-a3b-unlike-tensor", "h100-sheet", "qwen3-30b-a3b", _work(
        4000, 6000, mode="tensor", tensor_split=(3.0, 5.0)), "Q4_K", change=_with_devices(2)),
    Case("v2-lite-4000", "h100", "deepseek-v2-lite", _work(4000)),
    Case("v2-lite-two-layer", "h100", "deepseek-v2-lite", _work(3000, 3000, mode="layer"), change=_with_devices(2)),
    Case("next-80b-12000", "h100", "qwen3-next-80b-a3b", _work(12000)),
    Case("hybrid-27b-8000", "h100", "qwen3.5-27b", _work(8000)),
    Case("experts-small", "rtx4060", "experts-small", _work(600, max_ubatch=512)),
    Case("8b-2000", "rtx4060", "llama3-8b", _work(2000)),
    Case("8b-lockable", "rtx4060", "llama3-8b", _work(3000), change=_with_lockable(1500)),
    Case("8b-learnt", "rtx5080", "llama3-8b", _work(3000), correction=LEARNT),
    Case("8b-four-users", "rtx4060", "llama3-8b", _work(3000, context=16384, sequences=4)),
    Case("2b-cpu", "h100-sheet", "qwen3-2b", _work(800, max_ubatch=512), change=on_cpu),
    Case("2b-bf16", "rtx4060", "qwen3-2b", _work(2000, max_ubatch=512), "BF16"),
    Case("2b-several", "h100", "qwen3-2b", _work(900), how="several"),
    Case("small-several", "rtx4060", "qwen2-small", _work(380, max_ubatch=512), how="several"),
    Case("three-layers", "rtx4060", "three-layers", _work(336, context=512, max_ubatch=128, prompt=256)),
    Case("tiny", "rtx4060", "qwen3-tiny", _work(322, context=256, max_ubatch=64, prompt=128, generated=64)),
    Case("tiny-cpu", "rtx4060", "llama-tiny", _work(2, context=256, max_ubatch=64, prompt=128), change=on_cpu),
    Case("one-layer", "rtx5080", "one-layer", _work(321, context=128, max_ubatch=32, prompt=64, generated=64)),
    Case("32b-serve-many", "h100", "qwen3-32b", _work(
        12000, context=16640, sequences=32, prompt=512, generated=128, concurrency=16)),
    Case("30b-a3b-serve-few", "h100", "qwen3-30b-a3b", _work(
        6000, context=16640, sequences=16, prompt=1024, concurrency=4)),
    Case("8b-serve-one", "rtx4060", "llama3-8b", _work(3000, sequences=4, concurrency=1)),
    *(
        Case(f"8b-{name}", "h100-sheet", "llama3-8b", _work(2500, max_ubatch=1024), how=name)
        for name in ("fit", "attention-first", "layer-stream", "ffn-stream", "ffn-cpu", "alternate-ffn", "per-tier")
    ),
)  # fmt: skip

QUICK = ("32b-6000", "8b-lockable", "2b-cpu", "small-several", "three-layers", "tiny", "8b-rank-with-nothing")
