"""Which mask functions of transformers are recognised as causal or as the model's sliding window, whatever was asked before."""

from types import SimpleNamespace

import pytest
import torch
from toy_models import COMMON, HEADS_4_2_32, generate, left_padded, random_model
from transformers import DynamicCache, Gemma3Config, Gemma3ForConditionalGeneration, StaticCache
from transformers.masking_utils import (
    and_masks,
    blockwise_overlay,
    causal_mask_function,
    chunked_causal_mask_function,
    or_masks,
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


@pytest.mark.parametrize("pattern", [causal_mask_function, sliding_window_causal_mask_function(WINDOW)])
@pytest.mark.parametrize("columns", [[], [17], [1, 2], [20, 21, 22]], ids=str)
def test_tokens_of_an_image_are_known_where_none_sees_a_later_one(pattern, columns):
    """Models with vision pass with every text which columns are tokens of an image; here two texts, the second without an image."""
    images = torch.full((2, 40), -1)
    images[0, columns] = 0

    def mask():
        function = or_masks(pattern, blockwise_overlay(images))
        return padding_mask(2, 30, 40, 10, mask_function=function, config=CONFIG)

    if len(columns) < 2:
        assert mask() is None
        return
    with pytest.raises(ValueError, match="tokens of an image or a prefix see later ones") as error:
        mask()
    assert "\n" not in str(error.value)


def test_a_model_that_sees_images_answers_a_text_as_without_the_cache():
    """Token types, which its processor passes with a text as well, say that no token is of an image."""
    text = {**COMMON, **HEADS_4_2_32, "sliding_window": WINDOW, "layer_types": ["full_attention", "sliding_attention"]}
    sight = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    sight |= {"image_size": 28, "patch_size": 14}
    model = Gemma3ForConditionalGeneration(Gemma3Config(text_config=text, vision_config=sight)).eval()
    inputs = left_padded([50, 31])
    kinds = torch.zeros_like(inputs["input_ids"])
    expected = generate(model, inputs, DynamicCache(config=model.config.get_text_config()), token_type_ids=kinds)
    with compress(model, "full") as cache:
        found = generate(model, inputs, cache, token_type_ids=kinds)
        cache.reset()
        kinds[:, 20:24] = 1
        with pytest.raises(ValueError, match="neither causal nor a sliding window"):
            generate(model, inputs, cache, token_type_ids=kinds)
    assert torch.equal(found.sequences, expected.sequences)


def test_a_model_without_a_window_has_no_such_pattern():
    with pytest.raises(ValueError, match="neither causal nor a sliding window"):
        asked(sliding_window_causal_mask_function(WINDOW), SimpleNamespace(sliding_window=None))


def test_a_static_cache_is_refused_while_a_compressed_one_is_attached():
    """Its keys end in empty ones, which would be attended."""
    model, ids = random_model("llama"), torch.arange(2, 32)[None]
    with (
        compress(model, "full"),
        pytest.raises(ValueError, match=r"a static cache passes 64 keys, of which only 30 are filled"),
    ):
        model(ids, past_key_values=StaticCache(config=model.config, max_cache_len=64))
