"""What runs in the next step, decided apart from any thread and clock."""
