"""The testbed: a small language model trained from nothing, and the generated documents it learns to retrieve from."""
