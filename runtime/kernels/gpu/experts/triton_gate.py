"""What an expert's down product takes, of its gate and its up."""

import triton
import triton.language as tl


@triton.jit
def activate(gate, up, CLAMPED: tl.constexpr):
    """silu(gate) * up, or gpt-oss' form: gate at most 7, up within -7..7, gate * sigmoid(1.702 gate) * (up + 1)."""
    if CLAMPED:
        low = tl.minimum(gate, 7.0, propagate_nan=tl.PropagateNan.ALL)
        wide = tl.maximum(tl.minimum(up, 7.0, propagate_nan=tl.PropagateNan.ALL), -7.0,
                          propagate_nan=tl.PropagateNan.ALL)  # fmt: skip
        return low / (1.0 + tl.exp(-1.702 * low)) * (wide + 1.0)
    else:
        return gate / (1.0 + tl.exp(-gate)) * up
