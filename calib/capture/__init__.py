"""Capture: run a language model over a corpus and give each attention layer's queries, keys and values to a callback."""
