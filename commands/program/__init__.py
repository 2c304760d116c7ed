"""The one program, and what it says of itself."""
