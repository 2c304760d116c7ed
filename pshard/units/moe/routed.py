"""What a layer's router leaves to its experts, and the scratch of both. No torch.

One block of float32 words for M tokens: the normed hidden states [M, d_model], then the numbers of the chosen experts
(int32 [M, k]), then their weights [M, k]. It is handed to the other side as it is.
"""

from pshard.model_config import Experts, ModelConfig
from pshard.units.ports import ROUTED
from pshard.units.scratch import Buffer


def routed_words(config: ModelConfig) -> int:
    """Words of a token."""
    return config.d_model + 2 * rule_of(config).used


def rule_of(config: ModelConfig) -> Experts:
    """The model's experts, which it has where it has a router."""
    assert config.experts is not None
    return config.experts


def routed_buffer(config: ModelConfig, tokens: int) -> Buffer:
    """The block."""
    return Buffer(ROUTED, (tokens, routed_words(config)), "f32")


def expert_buffers(config: ModelConfig, tokens: int) -> tuple[Buffer, ...]:
    """Scratch of experts: gated products and results of every token's experts, and an order of these by expert."""
    return scratch_of(rule_of(config), config.d_model, tokens)


def scratch_of(rule: Experts, d_model: int, tokens: int) -> tuple[Buffer, ...]:
    """The same for experts of any model."""
    picks = tokens * rule.used
    return (
        Buffer("gated", (picks, rule.d_expert), "act"),
        Buffer("picked", (picks, d_model), "act"),
        Buffer("order", (4 * picks + 4 * rule.count + 64,), "f32"),
    )
