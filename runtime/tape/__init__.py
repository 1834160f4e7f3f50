"""Decode steps without graphs: a layer's launches are listed once and done again, with little left to do for the host."""
