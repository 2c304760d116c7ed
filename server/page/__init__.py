"""The page at /: what the server does now, and a box to talk with the model."""
