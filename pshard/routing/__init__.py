"""Which experts texts use: records of it, the order of popularity that follows, and caches replayed over them."""
