"""pshard: profile the machine, plan where every unit of a model lives, and run the plan."""

__version__ = "0.1.0"
