"""Calibrated fp8 scales of keys and values beside a model's weights, as vLLM reads them (`docs/engines.md`)."""
