"""What is at each path: from a request that was read to its answer."""
