"""What records of routing say of a plan: where experts are, and what share of a text each place serves."""
