"""Parts of a report that answer to the mouse, and say the same without it."""
