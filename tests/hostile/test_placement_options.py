"""Wrong options of `specache`, `infllm` and `offload`: each raises one line with the value, the range and a remedy."""

import pytest
import torch
from one_line import message, refused
from toy_models import generate, left_padded, random_model
from transformers import DynamicCache
from unrotatable import UNROTATABLE

from calib.runtime import compress
from calib.runtime.cache_argument import NAME

NAN = float("nan")
NO_COUNT = (-1, 1.5, "64", None, True, [8], NAN)


@pytest.fixture(scope="module")
def model():
    return random_model("llama")  # head_dim 32


LOW = "low must be a mapping such as {method: csr, sparsity: 8}"
EVICTS = ["drops tokens", "keeps them all"]
APART = ["keeps its own tokens in host memory", "keeps every token on the device"]
SPECACHE = [
    *(({"k": wrong}, ["k must be a whole number of tokens, at least 0", repr(wrong), "64"]) for wrong in NO_COUNT),
    *(
        ({"speculative": wrong}, ["speculative must be True or False", repr(wrong)])
        for wrong in (None, 0, 1, "yes", "False", [True])
    ),
    *(
        ({"bits": wrong}, ["bits must be a whole number 1 ... 8", repr(wrong)])
        for wrong in (0, 9, 16, -2, 2.0, "2", None, True)
    ),
    *(
        ({"group": wrong}, ["group must be a whole number", "at least 1", repr(wrong), "32 is usual"])
        for wrong in (0, -1, 1.5, "32", None, True)
    ),
    ({"group": 24}, ["24", "does not divide a page of 128", "1, 2, 4"]),
    ({"group": 64}, ["group of 64", "32 channels", "divisor of 32"]),
    *(
        ({"residual": wrong}, ["residual must be a whole number", "at least 1", repr(wrong), "rtn"])
        for wrong in (0, -1, 1.5, "64", None, True)
    ),
    ({"residual": 48}, ["48", "groups of 32", "a residual that 32 divides"]),
    *(({"clip": wrong}, ["clip must be a number in (0, 1]", repr(wrong)]) for wrong in (0, -1, 2, "1", True, NAN)),
    *(({"low": wrong}, [LOW, repr(wrong)]) for wrong in ("csr", ["csr"], 0, "", [], True, {}, {"sparsity": 8})),
    ({"low": {"method": "csrr"}}, ["unknown method 'csrr'", "did you mean 'csr'?"]),
    *(({"low": {"method": wrong}}, ["unknown method", repr(wrong), "csr"]) for wrong in (None, 3, ["csr"])),
    ({"low": {"method": "csr", "sparsty": 3}}, ["'sparsty'", "'csr'", "did you mean 'sparsity'?"]),
    ({"low": {"method": "csr", "sparsity": 0}}, ["sparsity must be a whole number from 1", "0"]),
    ({"low": {"method": "kivi", "bits": 9}}, ["bits must be a whole number 1 ... 8", "9"]),
    ({"low": {"method": "kivi", "statistics": "calibrated"}}, ["needs an artifact", "Artifact.load"]),
    ({"low": {"method": "kivi", "corrections": 5}}, ["corrections must be a mapping", "5"]),
    ({"low": {"method": "gear", "corrections": {"rank": 2}}}, ["'gear'", "options of its own"]),
    *(
        ({"low": {"method": method, **options}}, [name, *EVICTS])
        for name, method, options in (
            ("H2O(", "h2o", {}),
            ("StreamingLLM(", "streaming_llm", {}),
            ("positions='original'", "streaming_llm", {"positions": "original"}),
            ("ZipCache(", "zipcache", {"tiers": [[4, 0.5], [0, 0.5]]}),
            ("Oracle(", "oracle", {}),
        )
    ),
    *(
        ({"low": {"method": method}}, [f"{name}(", *APART])
        for name, method in (("SpeCache", "specache"), ("InfLLM", "infllm"), ("Offload", "offload"))
    ),
    *(
        ({name: {"keys": 1}}, [f"{name} must be one setting for both streams or {{keys: ..., values: ...}}", "name both"])
        for name in ("bits", "group", "residual", "clip")
    ),
    ({"residual": {"keys": 64, "values": 0}}, ["residual of values must be a whole number", "at least 1", "got 0"]),
    ({"residual": {"keys": 64, "values": 62}}, ["values would be encoded before the keys", "at least as early"]),
    ({"bits": {"keys": 2, "values": 9}}, ["bits of values", "1 ... 8", "got 9"]),
    # Corrections of the low-bit copy are checked like those of other methods.
    ({"corrections": 5}, ["corrections must be a mapping", "5"]),
    ({"corrections": {"outliers": 2}}, ["outliers must be a share from 0 to 1, got 2"]),
    ({"corrections": {"outlier": 0.1}}, ["'outlier'", "did you mean 'outliers'?"]),
    *(
        ({"low": {"method": "rtn"}, **own}, [f"{next(iter(own))}={next(iter(own.values()))}", "give it within `low`"])
        for own in ({"bits": 4}, {"group": 16}, {"residual": 32}, {"clip": 0.5})
    ),
    ({"kk": 2}, ["'kk'", "'specache'", "did you mean 'k'?"]),
    ({"window": 2}, ["'window'", "'specache'", "known: k, speculative"]),
]  # fmt: skip

INFLLM = [
    *(
        ({name: wrong}, [f"{name} must be a whole number", f"at least {least}", repr(wrong)])
        for name, least in (("initial", 0), ("window", 1), ("block", 1), ("representatives", 1), ("fetched", 0))
        for wrong in (-1, *([0] if least else []), 1.5, "4", None, True, [4], NAN)
    ),
    *(
        ({"positions": wrong}, ["positions must be one of cache, original", repr(wrong)])
        for wrong in ("cash", "", None, 1, ["cache"], {}, True)
    ),
    *(
        ({"prefill": wrong}, ["prefill must be one of blocks, exact", repr(wrong)])
        for wrong in ("block", "", None, 1, ["exact"], True)
    ),
    *(
        (
            {"prefill": prefill, "chunk": wrong},
            ["chunk must be a whole number", "at least 1", repr(wrong), "512 is usual"],
        )
        for prefill in ("blocks", "exact")
        for wrong in (0, -1, 1.5, "512", True, [4], NAN)
    ),
    ({"chunk": 2**31}, ["chunk must be a whole number, at most 1073741824"]),
    ({"block": 2}, ["representatives must be at most a block's tokens", "4 of 2"]),
    ({"representatives": 129}, ["representatives", "129 of 128"]),
    ({"corrections": {"outliers": 0.05}}, ["corrections", "leave them out"]),
    ({"corrections": {"residual_bits": 2}}, ["corrections", "leave them out"]),
    ({"corrections": "all"}, ["corrections must be a mapping", "'all'"]),
    ({"windw": 2}, ["'windw'", "'infllm'", "did you mean 'window'?"]),
    ({"k": 2}, ["'k'", "'infllm'", "known: initial, window"]),
]

OFFLOAD = [
    ({"corrections": {"outliers": 0.05}}, ["quantises nothing that could be corrected", "leave them out"]),
    ({"corrections": {"residual_bits": 2}}, ["quantises nothing that could be corrected", "leave them out"]),
    *(({name: 2}, [f"'{name}'", "'offload'", "known: corrections"]) for name in ("bits", "on_host", "k")),
]

WRONG = [
    (method, *row)
    for method, rows in (("specache", SPECACHE), ("infllm", INFLLM), ("offload", OFFLOAD))
    for row in rows
]


@pytest.mark.parametrize(("method", "options", "parts"), WRONG, ids=lambda part: str(part)[:60])
def test_wrong_options(model, method, options, parts):
    text = refused(model, method, options)
    assert all(part in text for part in parts), text


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("specache", {"k": 0}),
        ("specache", {"k": 10**9, "bits": 1}),
        ("specache", {"low": {"method": "rtn"}, "k": 3}),
        ("specache", {"low": {"method": "mikv"}}),
        ("specache", {"low": {"method": "gear"}}),
        ("specache", {"low": {"method": "zipcache"}}),
        ("specache", {"corrections": {}}),
        ("infllm", {"initial": 0, "window": 1, "block": 1, "representatives": 1}),
        ("infllm", {"fetched": 0}),
        ("infllm", {"block": 4}),
        ("infllm", {"corrections": {}}),
        ("infllm", {"chunk": 1}),
        ("infllm", {"prefill": "exact", "chunk": 1}),
        ("offload", {"corrections": {}}),
    ],
    ids=str,
)
def test_what_lies_at_the_edge_is_taken(model, method, options):
    with compress(model, method, **options) as cache:
        generate(model, left_padded([70]), cache, max_new_tokens=3)
        assert cache.memory().host_bytes > 0


@pytest.mark.full
def test_corrections_are_those_of_the_low_bit_copy(model):
    """Corrections have the same effect as an option of `specache` and within `low`, and they do have one."""
    found, corrections = [], {"outliers": 0.05}
    for options in (
        {"corrections": corrections},
        {"low": {"method": "kivi", "residual": 64, "corrections": corrections}},
        {},
    ):
        with compress(model, "specache", k=4, **options) as cache:
            found.append(torch.stack(generate(model, left_padded([200]), cache).logits))
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])


# --- models whose keys cannot be unrotated --------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize(("make", "reason"), UNROTATABLE)
def test_a_rope_that_cannot_be_turned(make, reason):
    model = make()
    text = refused(model, "infllm", {})
    assert text.startswith(type(model).__name__) and reason in text and "use positions='original'" in text, text
    text = refused(model, "specache", {"low": {"method": "csr"}})
    assert reason in text and "'kivi'" in text, text
    for method, options in (("infllm", {"positions": "original", "window": 20, "block": 8}), ("specache", {"k": 9})):
        with compress(model, method, **options) as cache:
            assert generate(model, left_padded([60]), cache).sequences.shape[0] == 1


# --- ways of generating -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"num_beams": 4}, ["beam_search", "num_beams=4"]),
        ({"num_beams": 2, "do_sample": True}, ["beam_sample", "num_beams=2"]),
        ({"prompt_lookup_num_tokens": 3}, ["assisted_generation"]),
    ],
    ids=str,
)
def test_custom_generate_decodes_one_token_at_a_time(model, options, parts):
    with compress(model, "specache") as cache, pytest.raises(ValueError, match="custom_generate") as error:
        generate(model, left_padded([30]), cache, custom_generate=cache.custom_generate, **options)
    text = message(error)
    assert all(part in text for part in (*parts, "greedily or by sampling", "leave custom_generate out")), text


def test_custom_generate_is_of_this_cache(model):
    with compress(model, "specache") as cache, compress(model, "specache") as other:
        for wrong in (other, DynamicCache(config=model.config)):
            with pytest.raises(ValueError, match="works with its own cache only") as error:
                generate(model, left_padded([30]), wrong, custom_generate=cache.custom_generate)
            assert f"{NAME}=cache" in message(error)
        assert not other.sequences.lengths and not cache.sequences.lengths
