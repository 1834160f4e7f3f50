"""Options that differ between keys and values: what each stream stores, its bits, and that records and files keep them."""

from dataclasses import asdict, dataclass, fields

import numpy as np
import oracle
import pytest
import torch
from cases import calibrated_artifact
from layer_walk import Tokens, feed
from tolerances import ODD_CODES, STORED
from toy_models import random_model

from calib.errors import UsageError
from calib.evaluate.entries.method import MethodEntry
from calib.runtime import compress
from calib.runtime.files.canonical_json import plain
from calib.runtime.methods import METHODS, Geometry, build, options_asked
from calib.runtime.methods.contract import check_bits
from calib.runtime.methods.per_stream import PerStream, Streams, as_written, is_per_stream, of_streams
from calib.runtime.methods.tuned import Choice, with_choices
from calib.runtime.prefix.prefix import PrefixError

pytestmark = pytest.mark.arithmetic

MIXED = {"keys": 4, "values": 2}


@pytest.fixture(scope="module")
def model():
    return random_model("llama-64")


# --- the concept ----------------------------------------------------------------------------------------------------


def test_a_plain_setting_is_of_both_and_a_mapping_says_each():
    assert of_streams("bits", 4) == of_streams("bits", {"keys": 4, "values": 4}) == PerStream(4, 4)
    found = of_streams("bits", {"values": 2, "keys": 4}, check_bits)
    keys, values = found
    assert (keys, values, found.of("keys"), found.of("values")) == (4, 2, 4, 2)
    assert of_streams("bits", found) is found and found.map(str) == PerStream("4", "2")
    assert of_streams("clip", None) == PerStream(None, None)
    assert [is_per_stream(one) for one in (MIXED, found, 4, None, {"keys": 4}, {})] == [True, True, *[False] * 4]


def test_it_can_be_a_default_and_is_written_as_users_write_it():
    @dataclass(frozen=True)
    class Options:
        bits: int | Streams[int] = PerStream(4, 2)

    assert hash(Options()) == hash(Options(PerStream(4, 2))) and Options() != Options(4)
    assert repr(fields(Options)[0].default) == "{'keys': 4, 'values': 2}"
    assert asdict(Options())["bits"] == as_written(Options().bits) == MIXED and as_written(4) == 4
    assert as_written([(PerStream(4, 2), 0.6), [2, 0.4]]) == [(MIXED, 0.6), [2, 0.4]]


@pytest.mark.parametrize(
    ("option", "said"),
    [
        (
            {"keys": 4},
            "bits must be one setting for both streams or {keys: ..., values: ...}, got {'keys': 4}; name both",
        ),
        ({"key": 4, "values": 2}, "got {'key': 4, 'values': 2}; name both"),
        ({"keys": 4, "values": 2, "both": 3}, "name both"),
        ({}, "got {}; name both"),
        ({"keys": 4, "values": 9}, "bits of values must be a whole number 1 ... 8, got 9"),
        ({"keys": MIXED, "values": 2}, "bits of keys must be a whole number 1 ... 8, got {'keys': 4, 'values': 2}"),
        (PerStream(True, 2), "bits of keys must be a whole number 1 ... 8, got True"),
        (9, "bits must be a whole number 1 ... 8, got 9"),
        ([4, 2], "bits must be a whole number 1 ... 8, got [4, 2]"),
    ],
)
def test_what_says_no_two_settings_is_refused(option, said):
    with pytest.raises(ValueError, match=r"^bits") as error:
        of_streams("bits", option, check_bits)
    assert said in str(error.value)


# --- what a cache then holds ----------------------------------------------------------------------------------------

# Options; those of a cache whose keys must have the same bits, and those of one whose values must.
HOLD = [
    ("rtn", {"bits": MIXED}, {"bits": 4}, {"bits": 2}),
    ("rtn", {"bits": 3, "clip": {"keys": 0.9, "values": 0.5}}, {"bits": 3, "clip": 0.9}, {"bits": 3, "clip": 0.5}),
    ("kivi", {"bits": MIXED, "residual": 32}, {"bits": 4, "residual": 32}, {"bits": 2, "residual": 32}),
    (
        "kivi",
        {"bits": 2, "group": {"keys": 16, "values": 64}, "residual": {"keys": 16, "values": 40}},
        {"bits": 2, "group": 16, "residual": 16},
        {"bits": 2, "group": {"keys": 8, "values": 64}, "residual": 40},
    ),
    ("specache", {"bits": {"keys": 1, "values": 2}}, {"bits": 1}, {"bits": 2}),
    ("turboquant", {"bits": MIXED}, {"bits": 4}, {"bits": 2}),
    ("kvarn", {"tile": 16, "sinks": 4}, {"tile": 16, "sinks": 4, "bits": 4}, {"tile": 16, "sinks": 4, "bits": 2}),
    ("oscar", {"bits": MIXED, "window": 8}, {"bits": 4, "window": 8}, {"bits": 2, "window": 8}),
    ("kvquant", {"bits": MIXED}, {"bits": 4}, {"bits": 2}),
    ("uniform", {"bits": MIXED}, {"bits": 4}, {"bits": 2}),
    ("group_wise", {"bits": MIXED}, {"bits": 4}, {"bits": 2}),
    ("outlier_reduced", {"outliers": {"keys": 0.1, "values": 0.0}}, {"outliers": 0.1}, {"outliers": 0.0}),
    ("gear", {"rank": {"keys": 6, "values": 1}}, {"rank": 6}, {"rank": 1}),
    ("gear", {"rank": {"keys": None, "values": 0}}, {}, {"rank": 0}),
    ("gear", {"rank": 5, "decode_rank": {"keys": None, "values": 4}}, {"rank": 5}, {"rank": 5, "decode_rank": 4}),
    (
        "zipcache",
        {
            "tiers": [[4, 1.0]],
            "recompress": 20,
            "corrections": {"outliers": {"keys": 0.05, "values": 0}, "rank": {"keys": 3, "values": 1}},
        },
        {"tiers": [[4, 1.0]], "recompress": 20, "corrections": {"outliers": 0.05, "rank": 3}},
        {"tiers": [[4, 1.0]], "recompress": 20, "corrections": {"rank": 1}},
    ),
    (
        "rtn",
        {"bits": 2, "corrections": {"residual_bits": MIXED, "residual_group": {"keys": 32, "values": None}}},
        {"bits": 2, "corrections": {"residual_bits": 4, "residual_group": 32}},
        {"bits": 2, "corrections": {"residual_bits": 2}},
    ),
]


def filled(model, name, options, artifact=None):
    """A cache with two rows of different lengths: prompts, a turn of 20 tokens (a block of GEAR), five steps."""
    if artifact is None and METHODS[name].needs_fit:
        artifact = calibrated_artifact(model)
    cache = compress(model, name, artifact, **options)
    cache.release()
    feed(cache, [Tokens.random(model, size, seed=size) for size in (150, 61)], columns=151)
    feed(cache, [Tokens.random(model, 20, seed=row) for row in range(2)])
    for step in range(5):
        feed(cache, [Tokens.random(model, 1, seed=step + row) for row in range(2)])
    return cache


@pytest.mark.full
@pytest.mark.parametrize(("name", "both", "of_keys", "of_values"), HOLD, ids=str)
def test_keys_are_stored_by_their_setting_and_values_by_theirs(model, name, both, of_keys, of_values):
    """Bit for bit as in caches that have the setting for both streams."""
    found, keys, values = (filled(model, name, options) for options in (both, of_keys, of_values))
    for layer, layer_keys, layer_values in zip(found.compressed, keys.compressed, values.compressed, strict=True):
        for row in range(2):
            held = oracle.held_tokens(layer, row)
            assert torch.equal(held.keys, oracle.held_tokens(layer_keys, row).keys)
            assert torch.equal(held.values, oracle.held_tokens(layer_values, row).values)
            assert not torch.equal(held.keys, oracle.held_tokens(layer_values, row).keys)


# Options, and bits of a packed value of keys and of values at 64 channels a head: codes, scales and zero points.
WEIGH = [
    ("rtn", {"bits": MIXED}, (4.5, 2.5)),
    ("rtn", {"bits": {"keys": 1, "values": 8}}, (1.5, 8.5)),
    ("kivi", {"bits": MIXED, "residual": 32}, (5.0, 3.0)),
    ("kivi", {"bits": {"keys": 2, "values": 4}, "group": {"keys": 32, "values": 64}, "residual": 32}, (3.0, 4.5)),
    ("specache", {"bits": {"keys": 1, "values": 2}}, (2.0, 3.0)),
    ("turboquant", {"bits": MIXED}, (4.25, 2.25)),
    # Tiles of 16: 32/16 + 16/64, and 32/64 + 16/16.
    ("kvarn", {"bits": {"keys": 2, "values": 8}, "tile": 16, "sinks": 4}, (4.25, 9.5)),
    # A block of 20 tokens of two heads. Keys: 32/20 for a channel's range, a factor 16/64 + 16/20 and a list of two outliers of
    # 24 bits a channel; values: 32/128, the same factor, two outliers of 24 bits a token.
    ("group_wise", {"bits": MIXED}, (5.6, 3.6)),
    ("gear_l", {"rank": {"keys": 4, "values": 1}, "decode_rank": {"keys": 3, "values": 0}}, (8.75, 4.25)),
    ("gear", {"bits": MIXED, "rank": {"keys": 1, "values": 0}}, (9.05, 2.625)),
    ("gear", {"rank": 0, "outliers": {"keys": 0.0, "values": 0.02}}, (5.6, 4.625)),
    ("rtn", {"bits": 2, "corrections": {"residual_bits": {"keys": 4, "values": 0}}}, (7.0, 2.5)),
]


@pytest.mark.parametrize(("name", "options", "bits"), WEIGH, ids=str)
def test_each_stream_weighs_what_its_setting_says(model, name, options, bits):
    cache = filled(model, name, options)
    for layer in range(len(cache.compressed)):
        for row in cache.tiers(layer):
            # The last encoded tier: with GEAR that of the block, because what a prompt shares is in the row's record.
            *_, encoded = (tier for tier in row if tier.keys_bits < 16 and tier.values_bits < 16)
            assert (encoded.keys_bits, encoded.values_bits) == pytest.approx(bits)
    memory = cache.memory()
    assert memory.marginal_bits == pytest.approx(sum(bits) / 2) and memory.measured_bytes == memory.predicted_bytes


def test_both_tiers_of_mikv_weigh_what_their_settings_say(model):
    """With 64 channels a head and groups of 32: 16 bits mean the model's dtype (float32); 8, 4 and 2 bits take 9, 5 and 3 with
    scales and zero points."""
    cache = filled(model, "mikv", {"important": {"keys": 16, "values": 8}, "retained": MIXED})
    for layer in range(len(cache.compressed)):
        for row in cache.tiers(layer):
            assert [(tier.keys_bits, tier.values_bits) for tier in row] == [(32.0, 9.0), (5.0, 3.0)]
    memory = cache.memory()  # marginal: both streams, and 32 bits of a position for 2 x 64 values
    assert memory.marginal_bits == (5.0 + 3.0) / 2 + 0.25 and memory.measured_bytes == memory.predicted_bytes


def rounded(groups: np.ndarray, bits: int) -> np.ndarray:
    """Groups `[..., values]` through the uniform quantiser, their two parameters stored in 16 bits."""
    found = np.empty_like(groups)
    for at in np.ndindex(groups.shape[:-1]):
        scale, zero = (float(np.float16(number)) for number in oracle.parameters(groups[at], bits, 1.0))
        found[at] = oracle.codes_at(oracle.level(groups[at], np.array(scale), np.array(zero)), bits) * scale + zero
    return found


def test_kivi_of_two_settings_holds_what_the_papers_formulas_say(model):
    """Keys at 3 bits in groups of 8 tokens, values at 1 in groups of 64 channels, from the raw tokens of a row of 61."""
    tokens = Tokens.random(model, 61, seed=3)
    options = {"bits": {"keys": 3, "values": 1}, "group": {"keys": 8, "values": 64}}
    cache = compress(model, "kivi", residual={"keys": 16, "values": 20}, **options)
    cache.release()
    feed(cache, [tokens])
    for layer, held in enumerate(cache.compressed):
        keys, values = (getattr(tokens, role)[layer].double().numpy().copy() for role in ("keys", "values"))
        packed = keys[:, :48].reshape(2, 6, 8, 64)  # all but 61 mod 16
        keys[:, :48] = rounded(packed.swapaxes(-1, -2), 3).swapaxes(-1, -2).reshape(2, 48, 64)
        values[:, :41] = rounded(values[:, :41], 1)
        found = oracle.held_tokens(held, 0)
        for stored, right in ((found.keys, keys), (found.values, values)):
            assert (np.abs(stored.numpy() - right) > STORED).mean() < ODD_CODES


def test_each_stream_takes_its_own_clip_of_the_artifact(model):
    artifact = calibrated_artifact(model)
    cache = filled(model, "kivi", {"bits": {"keys": 3, "values": 8}, "residual": 32}, artifact)
    for number, layer in enumerate(cache.compressed):
        keys, values = layer.plan.keys.codec, layer.plan.values.codec
        assert torch.equal(keys.clip, artifact.clip("keys", "32x1", 3)[number][:, None, None])
        assert torch.equal(values.clip, artifact.clip("values", "1x32", 8)[number][:, None, None])


def test_the_stream_of_specaches_copy_that_has_1_bit_takes_its_middles():
    low = build("specache", {"bits": {"keys": 1, "values": 2}}).plan(0, Geometry(2, 2, 64), None).low
    assert (low.keys.codec.clip, low.values.codec.clip) == (0.5, 1.0)  # eq. 3
    low = build("specache", {"bits": 1, "clip": {"keys": 0.7, "values": None}}).plan(0, Geometry(2, 2, 64), None).low
    assert (low.keys.codec.clip, low.values.codec.clip) == (0.7, 0.5)


# --- where the option goes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [MIXED, PerStream(4, 2)], ids=["mapping", "PerStream"])
def test_it_is_recorded_as_it_is_written(bits):
    asked = options_asked(build("kivi", {"bits": bits, "corrections": {"outliers": 0.02}}))
    assert plain(asked, "options")["bits"] == MIXED and type(asked["bits"]) is dict
    assert options_asked(build("kivi", asked)) == asked
    nested = options_asked(build("specache", {"low": {"method": "rtn", "bits": bits}}))
    assert nested["low"]["method"] == "rtn" and nested["low"]["bits"] == MIXED and type(nested["low"]["bits"]) is dict


def test_a_row_of_an_evaluation_tells_streams_from_columns():
    options = {
        "bits": MIXED,
        "clip": {"perplexity": {"keys": 1.0, "values": 0.8}, "20 lines": 1.0},
        "corrections": {"rank": {"keys": 4, "values": 2}, "outliers": 0.02},
    }
    row = MethodEntry("row", "", options, "kivi")
    assert row.options_for("20 lines") == options | {"clip": 1.0}
    assert row.options_for("perplexity")["clip"] == {"keys": 1.0, "values": 0.8}
    with pytest.raises(UsageError, match="clip has no value for the column '60 lines'"):
        row.options_for("60 lines")


def test_a_prefix_goes_on_with_the_same_settings_and_no_others(model, tmp_path):
    inputs = {"input_ids": torch.randint(3, 90, (1, 70), generator=torch.Generator().manual_seed(1))}
    with compress(model, "kivi", bits=MIXED, residual=32) as cache, torch.no_grad():
        model(**inputs, past_key_values=cache)
        cache.save(tmp_path / "prefix.safetensors")
        held = oracle.contents(cache)
    prefix = tmp_path / "prefix.safetensors"
    with compress(model, "kivi", prefix=prefix, bits=PerStream(4, 2), residual=32) as again:
        for rows, expected in zip(oracle.contents(again), held, strict=True):
            assert all(torch.equal(*parts) for parts in zip(rows[0][:2], expected[0][:2], strict=True))
    with pytest.raises(PrefixError, match="bits"):
        compress(model, "kivi", prefix=prefix, bits={"keys": 2, "values": 4}, residual=32)


def test_what_calib_tune_wrote_is_followed(model, tmp_path):
    own = [{"bits": {"keys": 4, "values": 1}}, {"bits": 2}, {"bits": PerStream(2, 3)}][: model.config.num_hidden_layers]
    choice = Choice("kivi", 3.0, {"residual": 32}, own, {}, {})
    with_choices(calibrated_artifact(model), [choice]).save(tmp_path / "tuned.calib.safetensors")
    artifact = type(calibrated_artifact(model)).load(tmp_path / "tuned.calib.safetensors")
    cache = filled(model, "kivi", {"tuned": 3.0}, artifact)
    found = [(layer.plan.keys.codec.bits, layer.plan.values.codec.bits) for layer in cache.compressed]
    assert found == [tuple(of_streams("bits", options["bits"])) for options in own]
