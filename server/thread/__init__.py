"""The thread that owns the engine, and what it publishes."""
