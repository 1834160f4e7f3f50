"""Calibrators: each file measures one thing about keys, values or queries, in plain torch, and names its tensors."""
