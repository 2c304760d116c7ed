"""Split states: how every value of a unit lies over the ranks while it is computed, derived from its cut.

A value is mirrored (every rank has all of it), split (each rank has a range of its columns) or partial (the sum over
the ranks is the value). `check_cut` walks a unit's operations and refuses a cut whose result would be wrong. It knows
nothing of how the cut was chosen, so it is an independent check of `pshard.cuts.tensor_cuts`. No torch.
"""

from dataclasses import dataclass

from pshard.errors import UserError
from pshard.model import ModelSpec, TensorSpec, Unit

Range = tuple[int, int]


@dataclass(frozen=True)
class TensorCut:
    """How one tensor lies over the ranks.

    `axis`: "none" (every rank holds all of it), "rows" (outputs of a matrix, elements of a vector) or "cols" (inputs).
    `ranges`: (start, stop) along that axis for each rank; ranges of k and v may repeat where ranks share a KV head.
    """

    role: str
    axis: str
    ranges: tuple[Range, ...]


@dataclass(frozen=True)
class UnitCut:
    """How the tensors of one unit lie over the ranks, in the order of `Unit.tensors`."""

    unit: str
    tensors: tuple[TensorCut, ...]

    def holds(self, rank: int) -> bool:
        """Whether the rank has a part of the unit's work. A unit without a cut tensor is on every rank."""
        cut = [t for t in self.tensors if t.axis != "none"]
        return not cut or any(t.ranges[rank][0] < t.ranges[rank][1] for t in cut)


@dataclass(frozen=True)
class State:
    """`kind`: "mirrored", "split" (at column `ranges`) or "partial" (a summand on every rank)."""

    kind: str
    ranges: tuple[Range, ...] = ()


MIRRORED, PARTIAL = State("mirrored"), State("partial")


def check_cut(spec: ModelSpec, unit: Unit, cut: UnitCut) -> None:
    """Raise UserError, naming architecture, tensor and reason, unless the unit gives the same result under this cut.

    attention and ffn must end in a partial sum (one all-reduce follows), the output in split logits (one gather).
    """
    flow = _Flow(spec, unit, cut)
    if unit.kind == "embedding":
        for tensor in unit.tensors:
            flow.expect(flow.cut(tensor.role).axis == "none", tensor.role, "rows of the embedding are looked up whole")
    elif unit.kind == "attention":
        x = flow.normed("attn_norm.weight")
        q, k, v = (flow.linear(x, name) for name in ("attn_q", "attn_k", "attn_v"))
        flow.head_norm("attn_q_norm.weight")
        flow.head_norm("attn_k_norm.weight")
        flow.summed(flow.linear(flow.attend(q, k, v), "attn_output"), "attn_output.weight")
    elif unit.kind == "ffn":
        x = flow.normed("ffn_norm.weight")
        gate, up = flow.linear(x, "ffn_gate"), flow.linear(x, "ffn_up")
        flow.expect(gate == up, "ffn_up.weight", "is not cut where ffn_gate.weight is")
        flow.summed(flow.linear(gate, "ffn_down"), "ffn_down.weight")
    elif unit.kind == "output":
        x = flow.normed("output_norm.weight")
        (head,) = unit.matrices
        logits = flow.linear(x, head.role.removesuffix(".weight"))
        flow.expect(logits.kind != "partial", head.role, "is cut over its inputs, but logits are gathered, not summed")
        if logits.kind == "split":
            flow.expect_tiling(head.role, logits.ranges, head.rows)
    else:
        flow.expect(False, unit.tensors[0].role, f"belongs to a unit of kind {unit.kind!r}, which cannot be cut")
    flow.expect_all_used()


class _Flow:
    """The operations of one unit, each from states to a state."""

    def __init__(self, spec: ModelSpec, unit: Unit, cut: UnitCut) -> None:
        self.spec, self.unit = spec, unit
        self.cuts = {t.role: t for t in cut.tensors}
        self.tensors: dict[str, TensorSpec] = {t.role: t for t in unit.tensors}
        self.used: set[str] = set()

    def expect(self, good: bool, role: str, reason: str) -> None:
        if not good:
            name = self.tensors[role].name if role in self.tensors else f"{self.unit.name} {role}"
            raise UserError(
                f"{self.spec.config.architecture}: {name} {reason}: it cannot run tensor-parallel; use -sm none"
            )

    def cut(self, role: str) -> TensorCut:
        self.expect(role in self.cuts, role, "is missing")
        self.used.add(role)
        return self.cuts[role]

    def expect_tiling(self, role: str, ranges: tuple[Range, ...], total: int) -> None:
        """Every index belongs to exactly one rank, in rank order."""
        at = 0
        for start, stop in ranges:
            self.expect(start == at <= stop, role, f"is cut into ranges {ranges} that leave a gap or overlap")
            at = stop
        self.expect(at == total, role, f"is cut up to {at} of {total}")

    def expect_all_used(self) -> None:
        for role in self.tensors:
            self.expect(role in self.used, role, "has no rule that says how it is cut")

    def normed(self, role: str) -> State:
        """RMSNorm of the mirrored residual stream."""
        self.expect(self.cut(role).axis == "none", role, "normalises over the whole vector but is cut")
        return MIRRORED

    def head_norm(self, role: str) -> None:
        """RMSNorm inside each head, where the model has it: right only if the weight belongs to one head."""
        if role in self.tensors:
            self.expect(self.cut(role).axis == "none", role, "is the same for every head but is cut")
            width, head = self.tensors[role].cols, self.spec.config.head_dim
            self.expect(width == head, role, f"normalises over {width} columns, more than one head of {head}")

    def linear(self, x: State, name: str) -> State:
        """x @ W.T + bias."""
        role = f"{name}.weight"
        weight = self.cut(role)
        if weight.axis == "cols":
            self.expect_tiling(role, weight.ranges, self.tensors[role].cols)
            self.expect(x == State("split", weight.ranges), role, "has its columns cut elsewhere than its inputs are")
            out = PARTIAL
        else:
            self.expect(x == MIRRORED, role, f"needs all of its inputs, which are {x.kind}")
            out = MIRRORED if weight.axis == "none" else State("split", weight.ranges)
        bias = f"{name}.bias"
        if bias in self.tensors:
            cut, width = self.cut(bias), self.tensors[bias].cols
            if out == PARTIAL:
                added = sorted(stop - start for start, stop in cut.ranges)
                once = cut.axis == "rows" and added == [0] * (len(added) - 1) + [width]
                self.expect(once, bias, "must be added on exactly one rank, whole")
            else:
                self.expect((cut.axis, cut.ranges) == (weight.axis, weight.ranges), bias, f"is not cut as {role} is")
        return out

    def attend(self, q: State, k: State, v: State) -> State:
        """Attention of whole q heads, each with its KV head on the same rank, equally many per KV head."""
        if q == k == v == MIRRORED:
            return MIRRORED
        config, role = self.spec.config, "attn_q.weight"
        self.expect(q.kind == "split", role, "is whole where k or v is cut")
        self.expect(k == v, "attn_v.weight", "is not cut where attn_k.weight is")
        self.expect_tiling(role, q.ranges, self.tensors[role].rows)
        d, group = config.head_dim, config.n_heads // config.n_kv_heads
        for rank, ((q0, q1), (k0, k1)) in enumerate(zip(q.ranges, k.ranges)):
            self.expect(q0 % d == q1 % d == 0, role, f"is cut inside a head on rank {rank}")
            heads = range(q0 // d, q1 // d)
            needed = (heads[0] // group * d, (heads[-1] // group + 1) * d) if heads else (k0, k0)
            self.expect((k0, k1) == needed, "attn_k.weight", f"on rank {rank} is not the KV heads of its q heads")
            each = {sum(h // group == g for h in heads) for g in range(k0 // d, k1 // d)}
            self.expect(len(each) <= 1, role, f"on rank {rank} has KV heads with unequal numbers of q heads")
        return q

    def summed(self, out: State, role: str) -> None:
        """The all-reduce after the unit: only a partial result may be summed."""
        self.expect(out == PARTIAL, role, f"gives a {out.kind} result, which the all-reduce would count wrongly")
