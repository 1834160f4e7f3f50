"""Reading and writing files: atomic writes, canonical JSON, and a cache's state as a tree of tensors and numbers."""
