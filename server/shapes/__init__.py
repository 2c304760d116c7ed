"""Shapes of answers, as clients of each interface read them: from what was made to JSON objects."""
