"""Statistics of keys, values and queries, in plain torch; each module's docstring lists the artifact's tensors it gives."""
