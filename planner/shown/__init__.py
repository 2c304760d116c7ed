"""What is said first of a plan: how fast, in how much memory, and in whose words."""
