"""How the next token is chosen: the settings, the chain of samplers, what a grammar allows."""

from pshard.runtime.sampling.sampler import Constraint, Sampler, Sampling

__all__ = ["Constraint", "Sampler", "Sampling"]
