"""What a profile calls the kernels that operations need, where it keeps that a card cannot run one with any tile."""

from pshard.units.operations import Attend, AttendLatent, DeltaNet, ExpertProducts, Operation, Route, matrices_of


def kernel_names(operation: Operation) -> tuple[str, ...]:
    """Of what may be refused; ranks share heads, so only the size of these counts. Of pairs of types of experts gates'
    with themselves count too: a profile times no more of many pairs."""
    match operation:
        case Attend():
            return (f"attention with heads of {operation.head_dim}",)
        case AttendLatent():
            return (f"attention over latents of {operation.rank}",)
        case DeltaNet():
            return (f"delta nets with heads of {operation.head}",)
        case ExpertProducts():
            gate, down = operation.gate.qtype, operation.down.qtype
            return tuple(dict.fromkeys((name_experts(gate, down), name_experts(gate, gate))))
        case Route():
            return (name_router(operation.router.qtype),)
    return tuple(dict.fromkeys(name_products(matrix.qtype) for matrix in matrices_of(operation)))


def name_products(qtype: str) -> str:
    """Products with matrices of a type."""
    return f"products of {qtype}"


def name_router(qtype: str) -> str:
    """Routers of a type."""
    return f"routers of {qtype}"


def name_experts(gate: str, down: str) -> str:
    """Routed experts whose gate and up, and down, have these types."""
    return f"experts of {gate}" + ("" if gate == down else f" and {down}")
