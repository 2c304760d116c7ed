"""What records of routing say of a plan, for people."""
