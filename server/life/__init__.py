"""A server from its start to its end: loading, draining, sleeping, budgets, ranks."""
