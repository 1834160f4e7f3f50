"""Figures of run files compared as every supported Python computes them: from 3.12 on `sum` of floats rounds less."""

import json


def without_last_bits(figures):
    """Returns JSON data with its floats rounded to 12 digits."""
    return json.loads(json.dumps(figures), parse_float=lambda text: float(f"{float(text):.12g}"))
