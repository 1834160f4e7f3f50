"""Decode steps without CUDA graphs: a layer's kernel launches are recorded once and repeated, with little work for the host."""
