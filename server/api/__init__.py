"""Requests read by tables of fields and ranges, and the shapes of answers: pure functions, no HTTP."""
