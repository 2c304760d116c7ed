"""What runs in the next step, and the thread that owns the engine."""
