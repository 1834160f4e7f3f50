"""Checkpoints whose own code cannot take a cache, as checkpoints of an architecture that can."""
