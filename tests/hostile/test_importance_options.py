"""Wrong options of the methods that use importance (`zipcache`, `mikv`, `h2o`, `oracle`, `streaming_llm`): each raises one line
with the value, the range and a remedy."""

import pytest
from cases import calibrated_artifact
from one_line import message, refused
from toy_models import left_padded, random_model
from unrotatable import UNROTATABLE

from calib.runtime import Artifact, compress


@pytest.fixture
def model():
    return random_model("llama")


NAN = float("nan")
# Method, wrong options, and parts that the message must have.
WRONG_OPTIONS = [
    *(
        (method, {"ratio": ratio}, ["ratio", "(0, 1]", repr(ratio)])
        for method in ("mikv", "oracle")
        for ratio in (0, 0.0, -0.1, 1.0001, 2, NAN, "0.2", None, True, [0.2])
    ),
    *(
        ("zipcache", {"ratio": ratio}, ["ratio", "0 to 1", repr(ratio)])
        for ratio in (-0.1, 1.5, NAN, "0.6", True, [0.6])
    ),
    ("zipcache", {"tiers": [[4, 0.6], [2, 0.3]]}, ["add up to 1", "[0.6, 0.3]", "0.9", "last tier"]),
    ("zipcache", {"tiers": [[4, 0.6], [2, 0.6]]}, ["add up to 1", "1.2"]),
    ("zipcache", {"tiers": [[4, -0.1], [2, 1.1]]}, ["0 to 1", "[-0.1, 1.1]"]),
    ("zipcache", {"tiers": [[4, NAN], [2, 0.4]]}, ["0 to 1", "nan"]),
    ("zipcache", {"tiers": [[4, "a"], [2, 0.4]]}, ["0 to 1", "'a'"]),
    ("zipcache", {"tiers": [[4, True], [2, 0.0]]}, ["0 to 1", "True"]),
    ("zipcache", {"tiers": [[2, 0.6], [4, 0.4]]}, ["fewer bits", "[2, 4]", "most precise first"]),
    ("zipcache", {"tiers": [[4, 0.5], [4, 0.5]]}, ["fewer bits", "[4, 4]"]),
    ("zipcache", {"tiers": [[0, 0.5], [4, 0.5]]}, ["only the last", "[0, 4]", "put it last"]),
    ("zipcache", {"tiers": [[4, 0.5], [0, 0.2], [0, 0.3]]}, ["only the last", "[4, 0, 0]"]),
    ("zipcache", {"tiers": [[0, 1.0]]}, ["bits", "1 ... 8, 16", "0"]),
    *(
        ("zipcache", {"tiers": [[bits, 0.6], [1, 0.4]]}, ["tiers", "1 ... 8, 16", repr(bits)])
        for bits in (9, 17, -4, 4.0, "4", None, True)
    ),
    *(
        ("zipcache", {"tiers": tiers}, ["tiers", "pairs (bits, share)", repr(tiers)])
        for tiers in ([], None, 5, "4,2", [4, 2], [[4]], [[4, 0.6, 1], [2, 0.4]], {4: 0.6, 2: 0.4})
    ),
    (
        "zipcache",
        {"tiers": [[4, 0.3], [3, 0.3], [2, 0.4]], "ratio": 0.5},
        ["ratio=0.5", "two tiers", "3", "into tiers"],
    ),
    *(
        ("zipcache", {"recompress": size}, ["recompress", "at least 1", repr(size)])
        for size in (0, -1, 1.5, "100", None)
    ),
    *(
        ("zipcache", {name: word}, [name, known, repr(word)])
        for name, known in (
            ("probes", "random+recent, random, recent, all, special"),
            ("saliency", "normalised, accumulated"),
            ("salient_set", "head, layer"),
            ("value_scale", "shared, tier"),
        )
        for word in ("promt", "", None, 3, ["all"])
    ),
    *(
        ("zipcache", {"probe_share": share}, ["probe_share", "(0, 1]", repr(share)])
        for share in (0, -0.1, 1.5, NAN, "0.1", None, True)
    ),
    *(
        ("zipcache", {"special_ids": [3], **more}, ["special_ids", "[3]", "only there"])
        for more in ({}, {"probes": "all"})
    ),
    ("zipcache", {"probes": "special"}, ["special_ids", "[]", "give the ids"]),
    *(
        ("zipcache", {"probes": "special", "special_ids": ids}, ["special_ids", "whole numbers from 0", part])
        for ids, part in (
            ([-1], "-1"),
            ([1.5], "1.5"),
            (["a"], "'a'"),
            ([True], "True"),
            (5, "5"),
            (None, "None"),
            ("7", "'7'"),
        )
    ),
    *(
        ("mikv", {name: bits}, [name, "1 ... 8", repr(bits)])
        for name in ("important", "retained")
        for bits in (0, 9, 2.5, "4", None)
    ),
    ("mikv", {"important": 2, "retained": 4}, ["retained=4", "important=2"]),
    (
        "mikv",
        {"important": {"keys": 16, "values": 2}, "retained": {"keys": 2, "values": 4}},
        ["retained={'keys': 2, 'values': 4}", "important={'keys': 16, 'values': 2}", "loses precision"],
    ),
    ("mikv", {"important": {"keys": 16, "values": 1}}, ["retained=2", "important={'keys': 16, 'values': 1}"]),
    ("mikv", {"important": {"keys": 16, "values": 9}}, ["important of values", "1 ... 8, 16", "got 9"]),
    ("mikv", {"retained": {"keys": 16, "values": 2}}, ["retained of keys", "1 ... 8", "got 16"]),
    ("mikv", {"retained": {"keys": 2}}, ["retained must be one setting for both streams", "name both"]),
    ("mikv", {"retained": 16}, ["retained", "1 ... 8", "16"]),
    *(("mikv", {"balancer": word}, ["balancer", "True or False", repr(word)]) for word in ("yes", None, 1)),
    ("mikv", {"budget": 9, "recent": 10}, ["budget of 9", "window of 10", "raise budget or lower recent"]),
    *(
        ("mikv", {name: size}, [name, "at least 1", repr(size)])
        for name in ("budget", "group")
        for size in (0, -3, 1.5, "9", True)
    ),
    *(("mikv", {"recent": size}, ["recent", "at least 0", repr(size)]) for size in (-1, 1.5, "9", True)),
    ("mikv", {"policy": "local", "recent": 3}, ["recent=3", "policy='local'", "leave it out"]),
    *(("mikv", {"keys": word}, ["keys", "token, channel", repr(word)]) for word in ("head", "", None, 4)),
    ("mikv", {"keys": "channel"}, ["keys='channel'", "statistics='prompt'", "use statistics='calibrated'"]),
    *(
        (method, options, parts)
        for method in ("mikv", "h2o")
        for options, parts in (
            *(
                ({"policy": word}, ["policy", "accumulated, normalised, local, fastgen", repr(word)])
                for word in ("frequency", "", None, 3, ["local"])
            ),
            *(({"probes": word}, ["probes", "random+recent", repr(word)]) for word in ("promt", "", 3, ["all"])),
            *(({"probe_share": share}, ["probe_share", "(0, 1]", repr(share)]) for share in (0, 1.5, NAN, "0.1", True)),
            *(({"recovery": share}, ["recovery", "(0, 1]", repr(share)]) for share in (0, 1.5, NAN, "0.9", None, True)),
            ({"policy": "local", "probe_share": 2}, ["probe_share", "(0, 1]", "2"]),
            ({"policy": "local", "probes": "all"}, ["probes='all'", "policy='local'", "leave it out"]),
            *(
                ({"policy": policy, "special_ids": [3]}, ["special_ids", "[3]", "only there"])
                for policy in ("accumulated", "normalised", "local")
            ),
            ({"probes": "special"}, ["special_ids", "[]", "give the ids"]),
            *(
                ({"policy": "fastgen", "special_ids": ids}, ["special_ids", "whole numbers from 0", part])
                for ids, part in (([-1], "-1"), ([1.5], "1.5"), (5, "5"), (None, "None"), ("7", "'7'"), (0, "0"))
            ),
        )
    ),
    ("mikv", {"group": 24}, ["24", "divide 32", "divisor"]),
    *(
        ("h2o", {name: amount}, [name, "whole number from 0", "0.0 ... 1.0", repr(amount)])
        for name in ("heavy", "recent")
        for amount in (-1, -0.1, 1.5, NAN, "x", None, True, [1])
    ),
    *(
        ("h2o", {"heavy": amount, "recent": amount}, ["heavy and recent", "at least one token", repr(amount)])
        for amount in (0, 0.0)
    ),
    ("h2o", {"heavy": 0.6, "recent": 0.5}, ["heavy and recent", "0.6 + 0.5", "in all"]),
    *(("streaming_llm", {"sinks": size}, ["sinks", "at least 0", repr(size)]) for size in (-1, 1.5, "4", None, True)),
    *(
        ("streaming_llm", {"window": size}, ["window", "at least 1", repr(size)])
        for size in (0, -1, 1.5, "4", None, True)
    ),
    *(
        ("streaming_llm", {"positions": word}, ["positions", "cache, original", repr(word)])
        for word in ("orig", "", None, 3)
    ),
    ("oracle", {"heavy": 0.1}, ["'heavy'", "'oracle'", "known: ratio"]),
    ("streaming_llm", {"windw": 3}, ["'windw'", "did you mean 'window'?"]),
]


@pytest.mark.parametrize(("method", "options", "parts"), WRONG_OPTIONS, ids=lambda part: str(part)[:40])
def test_wrong_options(model, method, options, parts):
    text = refused(model, method, options)
    assert all(part in text for part in parts), text


def test_an_artifact_without_a_statistic_that_is_not_used(model):
    """The tensor of the balancer is not required without a balancer, or with statistics of the prompt."""
    whole = calibrated_artifact(model)
    tensors = {name: tensor for name, tensor in whole.tensors.items() if name != "keys.balancer"}
    artifact = Artifact(tensors, whole.fingerprint, whole.provenance, whole.clip_bits)
    for options in ({"statistics": "calibrated", "balancer": False}, {"statistics": "prompt"}):
        compress(model, method="mikv", artifact=artifact, **options).release()


# --- models whose keys cannot be unrotated --------------------------------------------------------------------------


@pytest.mark.parametrize(("make", "reason"), UNROTATABLE)
def test_positions_inside_the_cache_need_a_rope_that_can_be_turned(make, reason):
    model = make()
    before = model.config._attn_implementation
    with pytest.raises(ValueError, match=f"{type(model).__name__}.*{reason}.*positions='original'") as error:
        compress(model, method="streaming_llm", window=9)
    message(error)
    assert model.config._attn_implementation == before
    with compress(model, method="streaming_llm", window=9, positions="original") as cache:
        model.generate(**left_padded([30, 20]), past_key_values=cache, max_new_tokens=3, do_sample=False)
        assert cache.sequences.lengths == [32, 22]


def test_special_probes_without_token_ids(model):
    inputs = left_padded([30])
    embeds = {"inputs_embeds": model.get_input_embeddings()(inputs["input_ids"])}
    with (
        compress(model, method="kivi") as cache,
        compress(model, method="zipcache", recompress=10, probes="special", special_ids=[5]) as special,
    ):
        for disturb in (False, True):
            if disturb:  # ids that another cache's forward was given are not this one's
                model(**inputs, past_key_values=cache)
            with pytest.raises(
                ValueError, match=r"probes='special' needs token ids.*input_ids, not with inputs_embeds"
            ) as error:
                model(**embeds, past_key_values=special)
            message(error)
            special.reset()
        model(**inputs, past_key_values=special)
        assert special.sequences.lengths == [30]
