"""Transfers between host and device: numbers that a step uploads, and copies on a side stream."""
