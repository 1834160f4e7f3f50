"""The task `distortion`: its figures and words, methods without a distance, and what it refuses."""

import json

import pytest
import torch
from toy_distortion import LENGTH, SEQUENCES, column, column_of, figures, model, opened
from toy_language_model import SIZES, save_text, toy_model
from transformers import AutoModelForCausalLM, Gemma2Config

from calib.errors import RunError, UsageError
from calib.evaluate.cell import Cell
from calib.evaluate.entries import Given, MethodEntry
from calib.evaluate.tasks.distortion import Distortion

# Tolerance in decibels: the sums of two runs have different orders.
DECIBELS = 1e-3


@pytest.mark.full
def test_batches_do_not_matter():
    one, three = (figures("zipcache", column=lambda size=size: column_of(model(), batch_size=size)) for size in (1, 3))
    assert one == pytest.approx(three, abs=DECIBELS)


@pytest.mark.parametrize(
    ("name", "brief"),
    [
        ("full", "exact"),
        ("offload", "exact"),
        ("oracle", "exact"),
        ("h2o", "9.4% kept"),
        ("zipcache-evicting", "50.0% kept"),
    ],
)
def test_what_is_exact_or_gone_has_no_distance(name, brief):
    found = figures(name)
    assert not [figure for figure in found if "distance" in figure or "error" in figure]
    assert column().words(found) == column().brief(found) == brief
    assert (found["encoded"] > 0) == (brief == "exact")


def test_blocks_that_are_not_full_are_not_measured():
    found = figures("kivi-4", column=lambda: column_of(model(), length=127))
    assert found["encoded"] == 0 and column().words(found) == "nothing encoded"
    found = figures("kivi-4")  # 128 keys and no value
    assert found["encoded"] == 0.5 and found["distance"] == found["keys distance"]
    assert column().words(found).endswith("bits)") and "values" not in column().words(found)


def test_words():
    found = {
        f"{kind} {name}": size
        for size, kind in enumerate(("keys", "logits", "values"))
        for name in ("distance", "excess")
    }
    assert column().words(found | {"distance": -0.5}) == (
        "-0.50 dB: keys 0.00 (0.00 bits), logits 1.00 (1.00 bits), values 2.00 (2.00 bits)"
    )
    assert column().brief(found | {"distance": 12.345}) == "12.35"


@pytest.mark.full
def test_a_model_whose_layers_round_differently_with_another_cache():
    """With a soft cap calib's attention rounds unlike SDPA: errors must be relative to the keys and values that this cache got."""
    layers = ["full_attention", "sliding_attention", "full_attention"]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = Gemma2Config(**SIZES, sliding_window=24, layer_types=layers, attn_logit_softcapping=5.0)
        own = AutoModelForCausalLM.from_config(config).eval().to(torch.bfloat16)
    found = figures("full", own, lambda: column_of(own))
    assert column().brief(found) == "exact"
    assert sorted(figure for figure in found if figure.startswith("keys bits")) == [
        "keys bits layer 0",
        "keys bits layer 2",
    ]
    assert figures("rtn-4", own, lambda: column_of(own))["keys error layer 2"] < -10


def test_nothing_is_left_on_the_model_or_the_cache():
    before = (model().config._attn_implementation, len(model()._forward_hooks))
    with opened("zipcache") as opened_cache:
        column().measure(opened_cache, column().batches()[0])
        assert "update" not in vars(opened_cache)
    assert (model().config._attn_implementation, len(model()._forward_hooks)) == before


def test_a_cell():
    cell = Cell(MethodEntry("two", "", {"bits": 2, "residual": 32}, "kivi"), column(), None)
    seen = []
    result = cell.measure(Given(model(), 7, None, {}), seen.append)
    assert sum(seen) == cell.tokens == SEQUENCES * LENGTH
    assert result["figures"] == figures("kivi-2-short")
    assert json.loads(json.dumps(result, allow_nan=False)) == result
    settings = {"task": "distortion", "text": "sampled from the model", "length": LENGTH, "sequences": SEQUENCES}
    assert column().settings == settings


def test_text_of_a_file_and_the_limit(tmp_path):
    file = str(save_text(tmp_path / "some.txt"))
    found = column_of(model(), text=file, limit=2)
    assert found.rows == found.settings["sequences"] == 2 and found.settings["sha256"]
    assert found.batches()[0].shape == (2, LENGTH)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": 1}, r"invalid value 1 for 'tasks.distortion.length' \(a whole number, at least 2\)"),
        ({"sequences": 0}, "invalid value 0 for 'tasks.distortion.sequences'"),
        ({"sequences": 2.0}, "invalid value 2.0 for 'tasks.distortion.sequences'"),
        ({"title": ""}, "invalid value '' for 'tasks.distortion.title'"),
        ({"text": "nowhere.txt"}, "tasks.distortion.text: no file 'nowhere.txt'; null samples text"),
        ({"natural_spacing": "yes"}, "'tasks.distortion.natural_spacing' must be true or false, got 'yes'"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(UsageError, match=message) as caught:
        Distortion(**options)
    assert "\n" not in str(caught.value)


def test_sequences_that_are_too_long():
    with pytest.raises(
        UsageError, match="distortion takes 257 tokens and this model was made for 256; give a smaller length"
    ):
        column_of(model(), length=257)
    sliding = toy_model("mistral")
    of = column_of(sliding, length=25)
    with (
        opened("rtn-4", sliding) as opened_cache,
        pytest.raises(RunError, match=r"sliding window of 24 tokens, got sequences of 25"),
    ):
        of.measure(opened_cache, of.batches()[0])
    assert figures("rtn-4", sliding, lambda: column_of(sliding, length=24))["encoded"] == 1
