"""Helpers for error messages about wrong values: short, printable, with the allowed range."""
