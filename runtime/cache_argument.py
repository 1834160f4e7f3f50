"""The name of the cache among a model's arguments: `cache` from transformers 5.24 on, `past_key_values` before.

From 5.24 on a caller may use the older name as well, with a FutureWarning.
"""

from collections.abc import Mapping
from typing import Any

from transformers.generation import GenerateDecoderOnlyOutput

NAMES = ("cache", "past_key_values")
NAME = next(name for name in NAMES if name in GenerateDecoderOnlyOutput.__dataclass_fields__)


def cache_in(arguments: Mapping[str, Any]) -> Any:
    """The cache among keyword arguments; None where there is none."""
    cache, older = map(arguments.get, NAMES)
    return older if cache is None else cache
