"""What dense FFNs make of their gate and their up."""

import triton
import triton.language as tl


@triton.jit
def gate_mul(gate, up, GELU: tl.constexpr):
    """silu(gate) * up; GELU: by its approximation with tanh, g / (1 + exp(-2 sqrt(2 / pi) (g + 0.044715 g^3)))."""
    if GELU:
        return gate / (1.0 + tl.exp(-1.5957691216 * (gate + 0.044715 * gate * gate * gate))) * up
    else:
        return gate / (1.0 + tl.exp(-gate)) * up
