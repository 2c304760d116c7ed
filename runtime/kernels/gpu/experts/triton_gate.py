"""What an expert's down product takes, of its gate and its up."""

import triton
import triton.language as tl

from pshard.runtime.kernels.gpu.products.triton_gates import gate_mul


@triton.jit
def activate(gate, up, ACTIVATION: tl.constexpr):
    """silu(gate) * up, a gelu's, or gpt-oss' "clamped" form: gate at most 7, up within -7..7,
    gate * sigmoid(1.702 gate) * (up + 1)."""
    if ACTIVATION == "clamped":
        low = tl.minimum(gate, 7.0, propagate_nan=tl.PropagateNan.ALL)
        wide = tl.maximum(tl.minimum(up, 7.0, propagate_nan=tl.PropagateNan.ALL), -7.0,
                          propagate_nan=tl.PropagateNan.ALL)  # fmt: skip
        return low / (1.0 + tl.exp(-1.702 * low)) * (wide + 1.0)
    else:
        return gate_mul(gate, up, ACTIVATION != "silu")
