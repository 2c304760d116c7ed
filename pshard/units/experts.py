"""A placeholder until experts are declared: only the roles of their tensors."""

from dataclasses import replace

from pshard.units.ffn import FFN

GATE, UP, DOWN = (f"ffn_{part}_exps.weight" for part in ("gate", "up", "down"))
GATE_BIAS, UP_BIAS, DOWN_BIAS = (f"ffn_{part}_exps.bias" for part in ("gate", "up", "down"))
EXPERTS = replace(FFN, name="experts")
