"""A placeholder until routers are declared: only the roles of their tensors."""

from dataclasses import replace

from pshard.units.ffn import FFN

NORM, ROUTER_WEIGHT, ROUTER_BIAS = "ffn_norm.weight", "ffn_gate_inp.weight", "ffn_gate_inp.bias"
CHOICE_BIAS = "exp_probs_b.bias"
SHARED_GATE, SHARED_UP, SHARED_DOWN = (f"ffn_{part}_shexp.weight" for part in ("gate", "up", "down"))
SHARED_SCALE = "ffn_gate_inp_shexp.weight"
ROUTER = replace(FFN, name="router")
