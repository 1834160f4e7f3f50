"""The stages methods are composed of: transform, codec, schedule (contracts in `contract.py`)."""
