"""Kinds of units of mixtures of experts, and what they hand on to each other."""
