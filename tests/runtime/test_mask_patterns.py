"""Which mask functions of transformers are taken for attention over the last tokens, whatever was asked before."""

from types import SimpleNamespace

import pytest
import torch
from toy_models import random_model
from transformers import StaticCache
from transformers.masking_utils import (
    and_masks,
    causal_mask_function,
    chunked_causal_mask_function,
    packed_sequence_mask_function,
    sliding_window_causal_mask_function,
)

from calib.runtime import compress
from calib.runtime.attention import padding_mask

WINDOW = 12
CONFIG = SimpleNamespace(sliding_window=WINDOW)


def asked(function, config=CONFIG):
    return padding_mask(1, 1, 40, 39, mask_function=function, config=config)


def by_default(window):
    """A mask function that knows its window as a parameter's default."""
    return lambda batch, head, query, key, width=window: (key <= query) & (key > query - width)


def test_a_window_is_known_again():
    for _ in range(2):
        assert asked(sliding_window_causal_mask_function(WINDOW)) is None
    assert asked(causal_mask_function) is None


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(lambda: sliding_window_causal_mask_function(WINDOW + 1), id="another window"),
        pytest.param(lambda: chunked_causal_mask_function(WINDOW, torch.zeros(1, dtype=torch.int64)), id="chunks"),
        pytest.param(
            lambda: and_masks(
                sliding_window_causal_mask_function(WINDOW),
                packed_sequence_mask_function((torch.arange(40) < 10).long()[None]),
            ),
            id="texts side by side",
        ),
        pytest.param(lambda: by_default(WINDOW + 1), id="a default"),
    ],
)
def test_others_are_refused(other):
    asked(sliding_window_causal_mask_function(WINDOW))
    asked(by_default(WINDOW))
    for _ in range(2):
        with pytest.raises(ValueError, match="neither causal nor a sliding window"):
            asked(other())


def test_a_model_without_a_window_has_no_such_pattern():
    with pytest.raises(ValueError, match="neither causal nor a sliding window"):
        asked(sliding_window_causal_mask_function(WINDOW), SimpleNamespace(sliding_window=None))


def test_a_static_cache_is_refused_while_a_compressed_one_is_attached():
    """Its keys end in empty ones, which would be attended."""
    model, ids = random_model("llama"), torch.arange(2, 32)[None]
    with (
        compress(model, "full"),
        pytest.raises(ValueError, match=r"a static cache hands over 64 keys, of which 30 are there"),
    ):
        model(ids, past_key_values=StaticCache(config=model.config, max_cache_len=64))
