"""A conversation over an engine: turns, what of them is cached, what of an answer is thought."""
