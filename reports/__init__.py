"""Measurements to tables, figures and pages."""
