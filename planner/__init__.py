"""Chooses placements: candidates, costs, integer program, ordering, simulation, baselines, check. No torch."""
