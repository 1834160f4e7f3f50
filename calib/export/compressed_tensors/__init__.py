"""Exports a checkpoint with calibrated fp8 scales of keys and values in the format that vLLM reads (`docs/engines.md`)."""
