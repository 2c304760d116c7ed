"""What a plan means for a server: how long its steps take, and what it can promise."""
