"""Unit: the smallest thing that is placed; UnitKind: all that is declared of a kind of units, in a file of its own.

Nothing else asks for a kind by its name: whoever must know what a unit does, keeps, allows or costs asks its kind here.
No torch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from pshard.errors import UserError
from pshard.homes import HOST, ON_CPU, ON_DEMAND, PINNED, SITES, STREAMED, VRAM, list_far_homes
from pshard.model_config import ModelConfig
from pshard.quant import TENSOR_ALIGN, align
from pshard.tensor import TensorSpec
from pshard.units.operands import STREAM
from pshard.units.operations import Norm, Operation
from pshard.units.ports import ADDS, ENTERED, HIDDEN, IDS, LOGITS, ROUTED, SUMMED, Ports
from pshard.units.ranges import place_rows
from pshard.units.scratch import Buffer
from pshard.units.state import State, StateShape

Place = tuple[str, str | None]  # the site of weights and the home of the state, by their names
ANYWHERE: tuple[Place, ...] = ((PINNED, None), (STREAMED, None), (ON_CPU, None))
ON_ACCELERATOR: tuple[Place, ...] = ((PINNED, None), (STREAMED, None))
ON_ACCELERATOR_WITH_STATE: tuple[Place, ...] = tuple(
    (site, home.name) for site in (PINNED, STREAMED) for home in (VRAM, HOST)
)
ANYWHERE_WITH_STATE: tuple[Place, ...] = (*ON_ACCELERATOR_WITH_STATE, (ON_CPU, HOST.name))
Tensors = Mapping[str, TensorSpec]  # a unit's tensors by role


@dataclass(frozen=True)
class Division:
    """What each side does of a unit of which the CPU computes some: both at once, then the accelerator the rest.

    on_acc, on_cpu: operations before what the CPU has computed is joined; after: those on the accelerator that follow.
    """

    on_acc: tuple[Operation, ...]
    on_cpu: tuple[Operation, ...]
    after: tuple[Operation, ...]


@dataclass(frozen=True, eq=False)
class Cut:
    """How ranks share a unit. Its one cut is a range of `length` things, and every tensor's range follows from it.

    rules: role -> (axis, which ranges): axis "none", "rows" or "cols"; which "cut", "kv" (of the KV heads that belong
    to the q heads), "each" (one element of every thing), "all", or "first" (whole, on the first rank that works).
    bounds: those of each rank's range nearest to the ranks' targets (None: the rank holds nothing). width: elements of
    one thing along a tensor's axis. stacks: of a tensor that is cut by rows, so many equal parts stand below each
    other, each of which is cut so. layout: (stacks, width) of each role, along either axis, where they differ.
    """

    rules: Mapping[str, tuple[str, str]]
    length: Callable[[ModelConfig, Tensors], int]
    bounds: Callable[[ModelConfig, Tensors, tuple[float | None, ...]], tuple[int, ...]]
    width: Callable[[ModelConfig], int] = lambda config: 1
    stacks: Callable[[ModelConfig], int] = lambda config: 1
    layout: Callable[[str, ModelConfig], tuple[int, int]] | None = None
    flag: str = ""  # what --max-tp calls the kind; "" where no rank count can be limited


def keep_whole(*roles: str) -> Cut:
    """Nothing is cut: every rank has all of these tensors."""
    rules = dict.fromkeys(roles, ("none", "all"))
    return Cut(rules, lambda config, tensors: 1, lambda config, tensors, targets: place_rows(1, 1, targets))


@dataclass(frozen=True, eq=False)
class UnitKind:
    """A kind of units, declared once.

    Attributes:
        name: as plans, tables and corrections call it.
        position: "first" (takes token ids), "layer", or "last" (gives logits of the rows that are wanted).
        places: legal placements.
        operations: what a unit runs, in order; see `Operation`.
        cut: how ranks share it; None: they cannot.
        widths: numbers of the ModelConfig, or of its experts, that a unit's tensors tell: those of a rank's slice are
            its widest units'.
        state: the law of what it keeps of its sequences, where a plan says; None when it keeps nothing so.
        stands: the law of what it keeps that is in VRAM whatever a plan says, as others read it there; see
            `ModelSpec.standing_nbytes`.
        scratch: buffers that it needs for micro-batches of so many tokens.
        ports: what a unit reads and writes, where a model's program says nothing else (`Unit.own_ports`).
        leads: whether it is the first of its layer.
        sees: the config with the numbers of its own layers; operations, state, scratch and cut are
            asked with it.
        llama_cpp: its tensors as a regular expression over what follows `blk.N.`; "" for units outside layers.
        strategy: what published strategies do with it: "first" (pinned before others), "bulk" (fills what is left) or
            "head".
        divided: roles of matrices whose last rows the CPU may compute while the accelerator computes the others.
        keep: what a unit runs whose last rows are streamed while all else lies in the arena, by the tensors there and
            in the slot; None where nothing is kept so.
        parts: of a kind whose matrices are stacks of equal parts (TensorSpec.parts), which the CPU, the arena and a
            slot may share: how many of how many each token takes.
        divide: what each side does of a divided unit, by the accelerator's tensors and the CPU's.
        joins: elements a token that the CPU hands over then, by what it has: its rows, or so many parts.
        contends: with what its host work holds up copies: "state" for what may read slowly, "weights", "" for nothing.
        phase: in (0, 1), where in a layer evenly spaced units of the kind that are left out of VRAM stand.
        lock_order: units of low numbers are page-locked first; None for what is never copied.
        listed: it is carried out from its operations, and needs nothing else of the runtime.
    """

    name: str
    position: str
    places: tuple[Place, ...]
    operations: Callable[[Tensors, ModelConfig], tuple[Operation, ...]]
    cut: Cut | None
    widths: Callable[[Tensors, ModelConfig], dict[str, int]] | None = None
    state: Callable[[ModelConfig, StateShape], State] | None = None
    stands: Callable[[ModelConfig, StateShape], State] | None = None
    scratch: Callable[[ModelConfig, int, StateShape], tuple[Buffer, ...]] | None = None
    ports: Ports = ADDS
    leads: bool = False
    sees: Callable[[ModelConfig], ModelConfig] = lambda config: config
    llama_cpp: str = ""
    strategy: str = ""
    divided: tuple[str, ...] = ()
    keep: Callable[[Tensors, Tensors, ModelConfig], tuple[Operation, ...]] | None = None
    parts: Callable[[ModelConfig], tuple[int, int]] | None = None
    divide: Callable[[Tensors, Tensors, ModelConfig], Division] | None = None
    joins: Callable[[int, ModelConfig], int] = lambda share, config: share
    contends: str = ""
    phase: float = 0.5
    lock_order: int | None = None
    listed: bool = False

    def __repr__(self) -> str:
        return f"<{self.name}>"

    @cached_property
    def is_looked_up(self) -> bool:
        """Whether its rows are looked up by token id: it is never streamed, and on the host it costs no hand-off."""
        return IDS in self.ports.reads

    @cached_property
    def gives_logits(self) -> bool:
        return LOGITS in self.ports.writes

    @cached_property
    def routes(self) -> bool:
        """Whether it says which experts tokens take."""
        return ROUTED in self.ports.writes


@dataclass(frozen=True)
class Cells:
    """Cells that a unit reads though they are another one's: which unit's, and the matrices that make its keys and
    values, which say how many heads they are of."""

    unit: str
    made_by: tuple[TensorSpec, ...]


@dataclass(frozen=True)
class Unit:
    """The smallest thing that is placed. `layer` is -1 outside layers. Its tensors lie together in one blob.

    order: of a unit with parts, their numbers in the order in which its stacks hold them; empty: in their own order.
    own_ports: where they are not those of its kind. lent: tensors of a unit of that name in another program, which it
    computes with where they lie there. stays_in_memory: what the model's files hold of it is not what is used, so that
    it cannot live beyond host memory. borrows: whose cells it reads; it keeps none.
    """

    name: str
    kind: UnitKind
    layer: int
    tensors: tuple[TensorSpec, ...]
    order: tuple[int, ...] = ()
    own_ports: Ports | None = None
    lent: tuple[TensorSpec, ...] = ()
    stays_in_memory: bool = False
    borrows: Cells | None = None

    def __hash__(self) -> int:
        return hash((self.name, self.packed_nbytes))  # caches ask often, and many models have units of one name

    @cached_property
    def ports(self) -> Ports:
        """What it reads and writes of what passes between units."""
        return self.own_ports or self.kind.ports

    @cached_property
    def summed(self) -> tuple[str, ...]:
        """Ports beside the residual stream where ranks sum what each has left."""
        return tuple(port for port in self.ports.writes if port in SUMMED)

    @cached_property
    def packed_nbytes(self) -> int:
        """Bytes of the unit's contiguous blob: one copy moves it."""
        return sum(align(t.packed_nbytes, TENSOR_ALIGN) for t in self.tensors)

    @cached_property
    def matrices(self) -> tuple[TensorSpec, ...]:
        return tuple(t for t in (*self.lent, *self.tensors) if len(t.shape) == 2)

    @cached_property
    def by_role(self) -> dict[str, TensorSpec]:
        return {t.role: t for t in (*self._elsewhere, *self.tensors)}

    @property
    def _elsewhere(self) -> tuple[TensorSpec, ...]:
        """Tensors of other units that say what it computes."""
        return (*self.lent, *(self.borrows.made_by if self.borrows else ()))

    def offsets(self) -> dict[str, tuple[int, TensorSpec]]:
        """Role -> (offset of the tensor in the unit's blob, tensor)."""
        table, at = {}, 0
        for tensor in self.tensors:
            table[tensor.role] = (at, tensor)
            at += align(tensor.packed_nbytes, TENSOR_ALIGN)
        return table

    def stays_in_bf16(self, matrix: TensorSpec) -> bool:
        """Whether products of many tokens with one of its matrices are never made in int8: what a model's first layer
        rounds reaches all others. Of stacks of experts they may be."""
        return self.layer == 0 and not matrix.parts

    @cached_property
    def likeness(self) -> tuple:
        """Units with equal likeness are of equal sizes and do the same; see `Setting.is_unlike` for what they cost."""
        tensors = (*self._elsewhere, *self.tensors)
        return (self.kind.name, self.own_ports, tuple((t.role, t.qtype, t.shape, t.parts) for t in tensors))

    def sees(self, config: ModelConfig) -> ModelConfig:
        """The config with the numbers of its own layer."""
        own, widths = self.kind.sees(config), self.kind.widths
        return own.resize(widths(self.by_role, own)) if config.layer_heads and widths else own

    def operations(self, config: ModelConfig) -> tuple[Operation, ...]:
        """What running the unit takes; nothing where another rank holds all of it."""
        return self.kind.operations(self.by_role, self.kind.sees(config)) if self.is_here else ()

    @property
    def is_here(self) -> bool:
        """Whether it has anything: another rank may hold all of it."""
        return bool(self.tensors or self.lent)

    def opens_with_norm(self, config: ModelConfig) -> bool:
        """Whether it begins with a norm of the whole residual stream, which may be made as something is added there."""
        first = next(iter(self.operations(config)), None)
        alone = isinstance(first, Norm) and first.x == STREAM and not first.centred
        # logits are of wanted rows only, and who takes what a layer began with needs the stream itself, or two inputs
        return alone and not {LOGITS, ENTERED} & {*self.ports.reads, *self.ports.writes}

    def state(self, config: ModelConfig, shape: StateShape) -> State | None:
        """The law of the unit's state, whether or not it stands."""
        law = self.kind.state or self.kind.stands
        return law(self.kind.sees(config), shape) if law else None

    def state_nbytes(self, config: ModelConfig, shape: StateShape) -> int:
        """Bytes of the unit's state for all sequences; 0 when it keeps none."""
        law = self.state(config, shape)
        return law.nbytes(shape) if law else 0


def places_of(kind: UnitKind, sums: bool) -> tuple[Place, ...]:
    """Legal placements of units of a kind; what may be streamed may also live beyond host memory, and what is looked up
    on disk. sums: on one of several ranks that sum their parts.

    Of these each has a router on its accelerator: a CPU rounds otherwise than a GPU, and where scores are nearly equal
    ranks would choose different experts and add up slices of both. What every rank adds to its own residual stream is
    there too.
    """
    far = (home.name for home in list_far_homes())
    places = (*kind.places, *((name, state) for name in far for site, state in kind.places if site == STREAMED))
    places += ((ON_DEMAND, None),) if kind.is_looked_up else ()
    alike = sums and (kind.routes or (HIDDEN in kind.ports.writes and not kind.is_looked_up))
    return tuple(place for place in places if not alike or SITES[place[0]].is_on_acc)


def places_of_unit(unit: Unit, sums: bool) -> tuple[Place, ...]:
    """Legal placements of a unit; see `places_of`."""
    places = places_of(unit.kind, sums)
    return tuple(p for p in places if not SITES[p[0]].is_beyond_host) if unit.stays_in_memory else places


def goes_on(unit: Unit, following: Unit) -> bool:
    """Whether ranks sum their parts of both units at once: the second one does not read the residual stream that the
    first one adds to."""
    return unit.ports.adds and following.ports.adds and HIDDEN not in following.ports.reads


@dataclass
class UnitKinds:
    """The kinds that there are, by name."""

    _known: dict[str, UnitKind] = field(default_factory=dict)

    def add(self, kind: UnitKind) -> UnitKind:
        """Make a kind known. Raises ValueError when another one has its name."""
        if self._known.setdefault(kind.name, kind) is not kind:
            raise ValueError(f"there are two kinds of units called {kind.name!r}")
        return kind

    def find(self, name: str) -> UnitKind:
        """The kind of that name. Raises UserError that lists those that there are."""
        if name not in self._known:
            raise UserError(f"no unit is of kind {name!r}; there are {', '.join(self._known)}")
        return self._known[name]

    def __iter__(self):
        return iter(self._known.values())
