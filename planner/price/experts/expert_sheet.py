"""Rows of routers and routed experts from a datasheet's rates."""

from pshard.machine import ExpertTiming, RouteTiming
from pshard.planner.price.experts.expert_tables import LayerShape, RouterShape
from pshard.planner.price.kernel_rates import CardRates, Work, experts_kernel, seconds_of
from pshard.quant import QUANT_TYPES, packed_nbytes

LAYERS = (
    *(LayerShape(q, q, 128, 8, 768, 2048) for q in QUANT_TYPES),
    LayerShape("MXFP4", "MXFP4", 32, 4, 2880, 2880),
)
ROUTERS = (RouterShape("F32", 128, 8, 2048), RouterShape("F32", 32, 4, 2880))
TOKENS = (1, 4, 16, 64, 256, 1024, 4096)
OF_CARDS = (1, 4, 8, 16, 64, 256, 1024, 4096, 16384)  # also where one kernel ends, and where rates still grow
KERNELS = 3  # of a layer's experts: gate and up, down, the weighted sum


def expert_rows(
    device: str, memory: float, flops: float, fixed: float, card: CardRates | None = None
) -> list[ExpertTiming]:
    """Experts by roofline: the bytes of those that are expected to be used over the memory's rate, or their products
    over the rate of arithmetic, whichever takes longer. memory: bytes a second; fixed: seconds of a kernel; card: what
    it reaches counts instead."""
    rows = []
    for layer in LAYERS:
        d, f = layer.d_model, layer.d_expert
        weights = 2 * packed_nbytes(layer.gate_qtype, f, d) + packed_nbytes(layer.down_qtype, d, f)
        for tokens in OF_CARDS if card else TOKENS:
            picks, touched = tokens * layer.used, layer.touched(tokens)
            nbytes = touched * weights + 4 * (2 * tokens * d + 2 * picks * (f + d))
            operations = 2 * picks * layer.elements
            if card:
                work = Work(operations, nbytes, touched * layer.elements, picks / touched)
                seconds = seconds_of(card, experts_kernel(tokens, work.each), work)
            else:
                seconds = max(nbytes / memory, operations / flops) + KERNELS * fixed
            shape = layer.gate_qtype, layer.down_qtype, layer.experts, layer.used, f, d
            rows.append(ExpertTiming(device, *shape, tokens, seconds))
    return rows


def route_rows(
    device: str, memory: float, flops: float, fixed: float, card: CardRates | None = None
) -> list[RouteTiming]:
    """Routers likewise, in one kernel."""
    rows = []
    for router in ROUTERS:
        for tokens in OF_CARDS if card else TOKENS:
            nbytes, operations = 4 * (router.elements + tokens * (router.d_model + router.experts)), 2 * tokens
            operations *= router.elements
            seconds = max(nbytes / memory, operations / flops) + fixed
            if card:
                seconds = seconds_of(card, "routing", Work(operations, nbytes))
            shape = router.qtype, router.experts, router.used, router.d_model
            rows.append(RouteTiming(device, *shape, tokens, seconds))
    return rows
