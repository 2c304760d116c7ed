"""Operations: what units are made of. What is timed is what is run is what is priced. No torch.

Each is one call of a device's kernels (`runtime/kernels/api.py`). The profile times them, the planner prices a unit as
the sum of its own, and the blocks of the runtime make the same calls. Tensors that a model does not have are None.
"""

from dataclasses import dataclass

from pshard.tensor import TensorSpec


@dataclass(frozen=True)
class LookUp:
    """Rows of a table by token id."""

    table: TensorSpec


@dataclass(frozen=True)
class Norm:
    """RMS norm of the residual stream, `width` elements a token; `adds`: of what a unit gives, onto that stream."""

    weight: TensorSpec | None
    width: int
    adds: bool = False


@dataclass(frozen=True)
class Product:
    """x[tokens, cols] @ W[rows, cols].T of one matrix; `adds`: onto the residual stream."""

    matrix: TensorSpec
    bias: TensorSpec | None = None
    adds: bool = False


@dataclass(frozen=True)
class ProductGroup:
    """Products of one input with several matrices, in one launch where their types allow it."""

    matrices: tuple[TensorSpec, ...]
    biases: tuple[TensorSpec | None, ...] = ()


@dataclass(frozen=True)
class GatedProduct:
    """silu(gate x) * (up x): two matrices, and the product of what they give, with `scale` times a number of each
    token."""

    gate: TensorSpec
    up: TensorSpec
    scale: TensorSpec | None = None


@dataclass(frozen=True)
class PlaceRows:
    """What another side computed of an activation, put where this side has its own: `width` elements a token."""

    width: int


@dataclass(frozen=True)
class Rotate:
    """Rotary embedding of q and k, with the store into the KV cache; with `norms` each head is normalised before."""

    n_heads: int
    n_kv_heads: int
    head_dim: int
    norms: tuple[TensorSpec, ...] = ()
    normed: bool = False

    @property
    def width(self) -> int:
        """Elements of q and k of one token."""
        return (self.n_heads + self.n_kv_heads) * self.head_dim


@dataclass(frozen=True)
class Attend:
    """Attention of the new tokens over the cells of their sequences: over the last `window` of them, the token's own
    among these (0: all), with a sink of every head beside them where there are some."""

    n_heads: int
    n_kv_heads: int
    head_dim: int
    window: int = 0
    sinks: TensorSpec | None = None

    @property
    def heads(self) -> tuple[int, int, int]:
        """Query heads, KV heads, elements of each, as kernels take them."""
        return self.n_heads, self.n_kv_heads, self.head_dim


@dataclass(frozen=True)
class HeadProducts:
    """A product of each head's own numbers with its own matrix, of those that stand in `stack` (TensorSpec.parts)."""

    stack: TensorSpec


@dataclass(frozen=True)
class StoreLatent:
    """Norm of the latent, rotary embedding of the queries' last numbers and of the shared key, store of both."""

    norm: TensorSpec
    n_heads: int
    rank: int
    rope: int

    @property
    def width(self) -> int:
        """Elements of a token that are read."""
        return self.rank + (self.n_heads + 1) * self.rope


@dataclass(frozen=True)
class AttendLatent:
    """Attention of the new tokens' absorbed queries over the cells of their sequences: a latent, which is the value
    too, and the shared key behind it."""

    n_heads: int
    rank: int
    rope: int

    @property
    def heads(self) -> tuple[int, int, int]:
        """Query heads, KV heads, elements of each, as tables of attention have them."""
        return self.n_heads, 1, self.rank + self.rope


@dataclass(frozen=True)
class Route:
    """Which `chosen` of the rows of `router` take each token, and with which weights."""

    router: TensorSpec
    chosen: int
    biases: tuple[TensorSpec, ...] = ()


@dataclass(frozen=True)
class ExpertProducts:
    """The FFNs of those experts in these stacks that tokens have chosen, and their weighted sum. A token takes `chosen`
    of the `of` experts of the layer. `first`: at which place of the layer the first of these stands."""

    gate: TensorSpec
    up: TensorSpec
    down: TensorSpec
    chosen: int
    of: int
    biases: tuple[TensorSpec, ...] = ()
    first: int = 0

    @property
    def places(self) -> range:
        """Those of the layer that are here."""
        return range(self.first, self.first + self.gate.parts)


def used_share(chosen: int, of: int, tokens: float) -> float:
    """The share of equal parts that so many tokens are expected to use, of which each takes `chosen` at random."""
    return 1 - (1 - chosen / of) ** tokens


Operation = (
    LookUp
    | Norm
    | Product
    | ProductGroup
    | GatedProduct
    | PlaceRows
    | Rotate
    | Attend
    | HeadProducts
    | StoreLatent
    | AttendLatent
    | Route
    | ExpertProducts
)


def matrices_of(operation: Operation) -> tuple[TensorSpec, ...]:
    """The matrices that an operation multiplies."""
    match operation:
        case Product():
            return (operation.matrix,)
        case ProductGroup():
            return operation.matrices
        case GatedProduct():
            return operation.gate, operation.up
        case HeadProducts():
            return (operation.stack,)
        case Route():
            return (operation.router,)
        case ExpertProducts():
            return operation.gate, operation.up, operation.down
    return ()
