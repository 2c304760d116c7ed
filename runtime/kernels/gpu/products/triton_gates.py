"""What FFNs and experts make of their gate and their up."""

import triton
import triton.language as tl

from pshard.model_config import limit_of


@triton.jit
def gate_mul(gate, up, GELU: tl.constexpr):
    """silu(gate) * up; GELU: by its approximation with tanh, g / (1 + exp(-2 sqrt(2 / pi) (g + 0.044715 g^3)))."""
    if GELU:
        return gate / (1.0 + tl.exp(-1.5957691216 * (gate + 0.044715 * gate * gate * gate))) * up
    else:
        return gate / (1.0 + tl.exp(-gate)) * up


find_limit = triton.constexpr_function(limit_of)  # as kernels may call it


@triton.jit
def activate(gate, up, ACTIVATION: tl.constexpr):
    """silu(gate) * up, relu's, a gelu's, or gpt-oss' "clamped" form: gate at most 7, up within -7..7,
    gate * sigmoid(1.702 gate) * (up + 1). "silu<7": silu(gate) at most 7, times up within -7..7."""
    LIMIT: tl.constexpr = find_limit(ACTIVATION)
    if LIMIT > 0:
        bent = tl.minimum(gate / (1.0 + tl.exp(-gate)), LIMIT, propagate_nan=tl.PropagateNan.ALL)
        least = tl.minimum(up, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        return bent * tl.maximum(least, -LIMIT, propagate_nan=tl.PropagateNan.ALL)
    elif ACTIVATION == "clamped":
        low = tl.minimum(gate, 7.0, propagate_nan=tl.PropagateNan.ALL)
        wide = tl.maximum(tl.minimum(up, 7.0, propagate_nan=tl.PropagateNan.ALL), -7.0,
                          propagate_nan=tl.PropagateNan.ALL)  # fmt: skip
        return low / (1.0 + tl.exp(-1.702 * low)) * (wide + 1.0)
    elif ACTIVATION == "relu":
        return tl.maximum(gate, 0.0, propagate_nan=tl.PropagateNan.ALL) * up
    else:
        return gate_mul(gate, up, ACTIVATION != "silu")
