"""What every unit's block has in common: the side that it runs on, and how it meets the residual stream.

A block computes a unit of its kind, written once for every device, in a file of its own. Placement is applied from
outside; see `find_block` for the table of all.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, cast

import torch

from pshard.batch_sizes import SMALL_BATCH
from pshard.model_config import ModelConfig
from pshard.runtime.kernels.api import (
    InnerNorm,
    Kernels,
    NormKernels,
    OpenNet,
    Packed,
    PendingSum,
    RopeTable,
    RowIndex,
    SumKernels,
)
from pshard.runtime.memory.weights import UnitWeights
from pshard.runtime.memory.workspace import Workspace
from pshard.units.attention import ROPES
from pshard.units.operations import Operation
from pshard.units.share import AT_ONCE, Wave
from pshard.units.state import StateShape
from pshard.units.unit import Unit

if TYPE_CHECKING:
    from pshard.runtime.ranks.peer_memory import PeerExchange


@dataclass(frozen=True)
class Residual:
    """How a unit meets the residual stream, its side's `hidden`.

    entering: what it adds to hidden before it reads it. part: [M, D], see `Group.part_dtype`, where its result goes
    when it is a rank's part of a sum; None: it is added to hidden. leaving: that sum, when the unit that follows makes
    it. begun: the unit before has left its own part there, to which it is added. following: weights of the norm by
    which the unit that follows begins, where the product that adds to hidden may leave it. postpones: the unit that
    follows makes the norms by which this one ends, see `Block.inner_norm`.
    """

    entering: PendingSum | InnerNorm | None = None
    part: torch.Tensor | None = None
    leaving: PendingSum | None = None
    begun: bool = False
    following: torch.Tensor | None = None
    postpones: bool = False

    def target(self, side: "Side", n: int) -> tuple[torch.Tensor, bool]:
        """Where the result of n tokens goes, float32 [n, D], and whether it is added to what is there."""
        return (side.space.rows("hidden", n), True) if self.part is None else (self.part, self.begun)


ALONE = Residual()  # no other rank has a part


@dataclass(frozen=True)
class Side:
    """One computing side: its kernels, scratch, and rotary tables by the scratch buffers that hold them."""

    kernels: Kernels
    space: Workspace
    ropes: dict[str, RopeTable]
    config: ModelConfig


def make_side(kernels: Kernels, space: Workspace, config: ModelConfig) -> Side:
    """The side that computes in `space`, with the rotary tables that lie there."""
    tables = {name: space.tensors[name] for name in ROPES if name in space.tensors}
    ropes = {name: RopeTable(table[0], table[1], config.rope.pairing) for name, table in tables.items()}
    return Side(kernels, space, ropes, config)


class LogitRows(Protocol):
    """Where the output leaves the logits of the rows that are wanted."""

    def tables(self, side: Side) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """As many rows at a time as the scratch holds: their numbers (int32 [R]), and float32 [R, rows of the head]."""
        ...

    def bring_none(self) -> None:
        """This rank has no column of them."""
        ...


@dataclass(frozen=True)
class Work:
    """A micro-batch on one side: where its rows stand, its token ids there (int64 [M]; on the accelerator also of rows
    that only fill it, and only where it looks them up), and its logits. exchange: through which ranks that all compute
    the same may compute a part each; None: they don't. grams: int64, flat, rows of a table of n-grams, as many of each
    token, where they are looked up."""

    side: Side
    rows: RowIndex
    ids: torch.Tensor
    logits: LogitRows
    exchange: "PeerExchange | None" = None
    grams: torch.Tensor | None = None


@dataclass(frozen=True)
class Laid:
    """A unit whose weights lie in place. device: what computes it, which may read them in host memory; operations: what
    it does of the unit there; wave: which of several the weights are."""

    unit: Unit
    config: ModelConfig
    weights: UnitWeights
    device: torch.device
    operations: tuple[Operation, ...]
    wave: Wave = AT_ONCE


class Block:
    """What units of one kind compute. `state`: as `view_state` gave it; None for units that keep none.

    Attributes:
        keeps_open: of a state that cannot be cut, whether rows can be held back from it; see `open_net`.
    """

    keeps_open: ClassVar[bool] = False

    def view_state(self, unit: Unit, config: ModelConfig, shape: StateShape, memory: torch.Tensor) -> Any:
        """Memory (uint8, on any device, as long as the state's law says) as `run` wants a unit's state.

        Of a sequence without a past the bytes there mean nothing: its state begins at the kind's beginning.
        """
        raise NotImplementedError(f"{unit.name} keeps a state, and {type(self).__name__} has no view of it")

    def open_net(self, unit: Unit, config: ModelConfig, state: Any, space: Workspace) -> OpenNet:
        """A state that cannot be cut, with where the side with that scratch leaves open rows of it."""
        raise NotImplementedError(f"{unit.name} keeps no rows open")

    def state_parts(self, state: Any) -> tuple[torch.Tensor, ...]:
        """The tensors that a state is made of, all entries in the first dimension: cells of the pool for a state that
        grows, else sequences."""
        return (state,)

    def prepare(self, laid: Laid) -> Any:
        """What `run` takes as weights, made once of a unit's bytes where they lie in a tier."""
        return laid.weights

    def first_norm(self, weights: Any) -> torch.Tensor | None:
        """Weights of the norm of hidden by which `run` begins, where only packed matrices, or routes, take its result;
        else None."""
        return None

    def ends_in_product(self, weights: Any) -> bool:
        """Whether `run` ends in a product that is added to hidden, and takes `Residual.following`."""
        return False

    def inner_norm(self, work: Work, weights: Any) -> InnerNorm | None:
        """What `run` and `run_rest` add to hidden by the norms in which they end, if they do; with
        `Residual.postpones` they leave that to the unit that follows."""
        return None

    def run(self, work: Work, weights: Any, state: Any, residual: Residual) -> None:
        """The whole unit."""
        raise NotImplementedError

    def run_share(self, work: Work, weights: Any, residual: Residual, out: torch.Tensor | None) -> None:
        """What one side has of a divided unit: its rows, or its parts. out: float32 [M, width], where the CPU leaves
        its result; None: the accelerator's stays where `run_rest` finds it."""
        raise NotImplementedError

    def run_rest(self, work: Work, weights: Any, residual: Residual, from_cpu: torch.Tensor) -> None:
        """What follows once the CPU's result of a divided unit, float32 [M, width], has come to the accelerator."""
        raise NotImplementedError

    def contribute_nothing(self, work: Work, residual: Residual) -> None:
        """The part of a rank that holds nothing of the unit."""
        if residual.part is not None and not residual.begun:
            residual.part.zero_()


def normalise(
    side: Side, weight: torch.Tensor, n: int, residual: Residual, out: torch.Tensor | None = None
) -> torch.Tensor:
    """The norm of hidden [n, D], to which what enters is added first; out None: the side's `normed`. Otherwise products
    of many rows will want it placed there."""
    hidden, eps, normed = side.space.rows("hidden", n), side.config.norm_eps, side.space.rows("normed", n)
    out, rounded = (normed, None) if out is None else (out, normed if n > SMALL_BATCH else None)
    if side.config.centred:
        side.kernels.centre_rows(hidden)
    match residual.entering:
        case None:
            side.kernels.rms_norm(hidden, weight, eps, out, rounded=rounded)
        case InnerNorm() as inner:
            side.kernels.add_normed(inner, hidden, (weight, eps, out), rounded)
        case sums:
            cast(SumKernels, side.kernels).sum_rms_norm(sums, hidden, weight, eps, out, rounded)
    return out


def take(side: Side, rows: torch.Tensor) -> torch.Tensor:
    """Rows of a port, float32 [n, D], as the side's products take them."""
    if side.kernels.act_dtype is torch.float32:
        return rows
    normed = side.space.rows("normed", rows.shape[0])
    side.kernels.place(rows, normed)
    return normed


def leave(side: Side, x: torch.Tensor, weight: Packed, bias: torch.Tensor | None, residual: Residual) -> None:
    """A unit's last product, added to `hidden` or left as this rank's part."""
    (out, accumulate), leaving = residual.target(side, x.shape[0]), residual.leaving
    if residual.following is not None:
        following, kernel = (residual.following, side.config.norm_eps), cast(NormKernels, side.kernels).linear
        kernel(x, weight, out, side.space.tile, bias, accumulate, following)
    elif leaving is None or accumulate:
        side.kernels.linear(x, weight, out, side.space.tile, bias, accumulate)
    else:
        kernels = cast(SumKernels, side.kernels)
        kernels.linear_part(leaving.exchange, leaving.wire, x, weight, out, side.space.tile, bias)
