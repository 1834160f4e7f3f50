"""Capture: run a language model over a corpus and hand out, layer by layer, what its attention sees."""
