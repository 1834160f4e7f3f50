"""The divergence of two layers' key or value vectors, and the groups of layers that share a dictionary."""
