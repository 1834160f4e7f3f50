"""Whole generations through attention's kernels, interpreted, against the same generations through plain torch.

Both answer the same tokens from nearly the same logits. Where a model has one layer its keys and values do not go through
attention, and what is stored in the end is the same bit for bit; what is evicted or demoted goes by mass that rounds.
"""

import random
import subprocess
import sys
from dataclasses import dataclass, replace

import pytest
import torch
from cases import BY_NAME, CASES
from launches import alone, counts, module_of, watch
from layer_walk import differing, stored
from one_line import message
from tolerances import FORWARD
from toy_models import generate, left_padded, random_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from calib.documents.words import WORDS
from calib.runtime import compress
from calib.runtime.methods import method_class, packs_of
from calib.runtime.stages.contract import Codec

MODEL = "artifacts/tiny-llama"
PROMPTS = [100, 61]
NEW = 4  # tokens; the interpreter takes its time

# Kernels of attention by the operation that launches them.
ATTENTION = {"attend": "attend", "desparsify_attend": "_attend"}

# And what meets tokens beside their codes.
SERVED = [*ATTENTION, "outliers"]

# One case of every method whose tokens a kernel attends to. In no case does it where tokens lie in host memory, or where
# other tokens are attended than are stored; and a window that nothing has left yet has no pages.
QUICK = [
    "full", "rtn-4", "kivi-3-short", "kivi-2-calibrated", "zipcache-16-4-2", "mikv-8-2", "h2o", "tova", "snapkv", "streaming_llm",
    "gear-60", "gear_l", "uniform", "group_wise", "outlier_reduced", "csr-paper", "klt-short", "klt-after-rope", "klt-predicted",
    "klt-trellis", "specache", "infllm-original", "oscar",
]  # fmt: skip
WITHOUT = ["oracle", "offload"]
UNPACKED = ["kivi-8", "kivi-4", "kivi-2", "kivi-4-calibrated"]
# Corrected tokens in order, sparse ones with corrections, those of a dictionary alone, and codes of channels of keys before RoPE:
# tile by tile.
IN_TILES = [
    "kivi-corrected",
    "rtn-twice",
    "csr-corrected",
    "csr-offline",
    "zipcache-before-rope",
    "zipcache-before-frozen",
]

# What a step launches that fetches tokens by their mass, besides masks for those that it has.
FETCHING = {"attend", "exact", "sum_rows", "largest", "exchange_entries", "gather_rows"}

# Rounded to 22 bits where a float32 model has 24, of the largest logit: 4 times that of a forward in float32.
ROUNDED = 4 * FORWARD[torch.float32]

# Mass is a sum of such weights.
MASS = 2**-14


@dataclass
class Outcome:
    """What one of the ways made of a run, and which kernels it launched."""

    tokens: torch.Tensor
    logits: torch.Tensor
    kept: list[dict[str, torch.Tensor]]
    launched: dict[str, int]


@pytest.fixture
def both(monkeypatch):
    """Runs a generation both ways; all operations but attention's in their plain form, or but `served`, unless `everything`."""

    def run(model, inputs, method, everything=False, served=SERVED, **asked):
        if not everything:
            alone(monkeypatch, *served)
        with monkeypatch.context() as patched:
            # One part for each row and head, where the number of parts is not the point.
            patched.setattr(module_of("attend"), "_programs", lambda device: 2)
            return [outcome(patched, way, model, inputs, method, asked) for way in ("reference", "triton")]

    return run


def outcome(monkeypatch, way, model, inputs, method, asked):
    """`method` is a case, or the options of `compress`."""
    monkeypatch.setenv("CALIB_KERNELS", way)
    with monkeypatch.context() as patched:
        launches = watch(patched)
        cache = compress(model, **method) if isinstance(method, dict) else method.open(model)
        with cache:
            found = generate(model, inputs, cache, **{"max_new_tokens": NEW} | asked)
            kept = [stored(cache, row) for row in range(len(cache.sequences.lengths))]
        return Outcome(found.sequences, torch.stack(found.logits), kept, counts(launches))


def check(outcomes, tolerance=ROUNDED, launched="attend", same=True):
    """The same tokens, logits within `tolerance` of the largest, and `same` what is stored."""
    plain, mine = outcomes
    assert not plain.launched
    assert bool(mine.launched.get(ATTENTION[launched])) if launched else not mine.launched
    assert torch.equal(mine.tokens, plain.tokens)
    assert (mine.logits - plain.logits).abs().max() <= tolerance * plain.logits.abs().max()
    if same:
        for found, expected in zip(mine.kept, plain.kept, strict=True):
            assert differing(found, expected, mass=MASS) == []
    return mine


def small(family="llama", dtype=torch.float32, **changes):
    """A toy model of one layer, or as many as `changes` say."""
    return random_model(family, dtype, **{"num_hidden_layers": 1} | changes)


def which(case):
    """The operation that attends to a case's pages, or None."""
    unserved = any(codec.has_kernel is Codec.has_kernel for codec in packs_of(method_class(case.method)))
    if unserved or case.name in [*WITHOUT, *UNPACKED, *IN_TILES]:
        return None
    return "desparsify_attend" if case.method == "csr" else "attend"


@pytest.mark.full
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=str(case), marks=() if case.name in QUICK + WITHOUT else pytest.mark.slow)
        for case in CASES
    ],
)
def test_every_method(case, both):
    """Two ragged rows, two query heads for each KV head."""
    check(both(small(), left_padded(PROMPTS), case), launched=which(case))


def test_every_method_that_is_served_is_quick():
    supported = {case.method for case in CASES if which(case)}
    assert supported == {BY_NAME[name].method for name in QUICK}


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "kernels"),
    [
        ("kivi-3-short", {"attend", "token_groups"}),
        pytest.param("zipcache-short", {"attend", "column_sums"}, marks=pytest.mark.slow),
        ("infllm-original", {"attend", "largest", "exchange_entries", "gather_rows"}),
        pytest.param("mikv-8-2", {"attend"}, marks=pytest.mark.slow),
        pytest.param("specache", FETCHING | {"hide"}, marks=pytest.mark.slow),
        pytest.param("csr-short", {"_attend", "pursue"}, marks=pytest.mark.slow),
        ("klt-trellis", {"attend", "search"}),
    ],
)
def test_with_all_operations(name, kernels, both):
    """Nothing but kernels. Pursuit chooses either of two atoms whose products round alike: what is stored may differ then."""
    case = BY_NAME[name]
    prompts = PROMPTS if name != "klt-trellis" else [44, 31]  # the interpreter takes seconds for a token's search
    outcomes = both(small(), left_padded(prompts), case, everything=True)
    mine = check(outcomes, launched=which(case), same="pursue" not in kernels)
    assert kernels <= set(mine.launched)


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "rank", "scored"),
    [("gear_l", 4, False), pytest.param("gear-calibrated", 4, True, marks=pytest.mark.slow)],
)
def test_low_rank_goes_with_the_codes(name, rank, scored, monkeypatch):
    """Its coefficients are read beside the codes; scores are written where outliers of values wait for them alone."""
    alone(monkeypatch, *SERVED)
    monkeypatch.setenv("CALIB_KERNELS", "triton")
    launches = watch(monkeypatch, "attend")
    with BY_NAME[name].open(model := small()) as cache:
        generate(model, left_padded(PROMPTS), cache, max_new_tokens=3)
    own = [launch.arguments for launch in launches if launch.kernel == "attend"]
    assert own
    for arguments in own:
        assert arguments["KEY_RANK"] == arguments["VALUE_RANK"] == rank
        assert (arguments["SCORES"] is not None) == (arguments["BIAS"] is not None) == scored


@pytest.mark.full
@pytest.mark.parametrize(
    ("method", "launched"),
    [
        ({"method": "gear", "block": 3}, True),
        ({"method": "gear", "block": 24, "outliers": {"keys": 0.1, "values": 0.2}, "per_head": True}, True),
        ({"method": "gear_l", "block": 3, "rank": 3, "decode_rank": 1}, True),
        # A prompt has too many vectors for a kernel, blocks have not.
        ({"method": "gear", "block": 3, "rank": 20, "decode_rank": 1}, True),
        # A whole matrix's outliers, and a second quantiser.
        ({"method": "gear", "block": 3, "variant": "paper", "rank": 2}, False),
        ({"method": "zipcache", "recompress": 3, "corrections": {"outliers": 0.1, "rank": 2, "decode_rank": 1}}, True),
        ({"method": "mikv", "balancer": False, "corrections": {"outliers": 0.1}}, True),
        ({"method": "zipcache", "recompress": 3, "corrections": {"outliers": 0.1, "residual_bits": 2}}, False),
        # One range for a page, which attention's kernel does not read either.
        ({"method": "uniform", "block": 3}, False),
    ],
    ids=str,
)
def test_what_lies_beside_codes(method, launched, both):
    """Lists of rows' prompts and of blocks, which are pages, and coefficients of either; what no kernel takes is met in torch."""
    for served in (SERVED, [*ATTENTION]):
        mine = check(both(small(), left_padded([71, 61]), method, served=served, max_new_tokens=5))
        of_prompts, of_blocks = (mine.launched[kernel] > 0 for kernel in ("list_mixtures", "mixture_terms"))
        assert (of_prompts or of_blocks) == (launched and served is SERVED)


@pytest.mark.full
@pytest.mark.parametrize(
    ("changes", "mixed"),
    [
        ({"predict": False}, False),
        ({"tiers": [[3, 0.2], [1, 0.8]], "bits": None, "window": None, "block": 20}, True),  # each with its position
        ({"corrections": {"outliers": {"keys": 0, "values": 0.1}}}, True),  # of what keys leave of values
    ],
    ids=str,
)
def test_sizes_and_predictions(changes, mixed, monkeypatch, both):
    """In the same launch as codes, keys' codes mixed where values are predicted; two runs of tokens are merged."""
    case = BY_NAME["klt-predicted"]
    options = {**case.options, **changes}
    case = replace(case, options={name: value for name, value in options.items() if value is not None})
    launches = watch(monkeypatch, "attend")
    check(both(small(), left_padded([140]), case))
    own = [launch.arguments for launch in launches if launch.kernel == "attend"]
    assert own and all(arguments["KEYS_MIXED"] == mixed for arguments in own)
    assert all(arguments["KEY_SIZES"] is not None and arguments["VALUE_SIZES"] is not None for arguments in own)


@pytest.mark.full
def test_parts_are_joined(monkeypatch):
    """One row has fewer heads than the device takes programs: several parts of its pages, joined with the window by its kernel."""
    alone(monkeypatch, *ATTENTION)
    case, model, inputs = BY_NAME["kivi-3-short"], small(), left_padded([140])
    mine = check([outcome(monkeypatch, way, model, inputs, case, {}) for way in ("reference", "triton")])
    assert mine.launched["exact"] == mine.launched["attend"] == NEW - 1 and not mine.launched["merge"]


@pytest.fixture(scope="module")
def embedded():
    """The embedded model, and a keyed list of which it is asked for a number."""
    draw, tokenizer = random.Random(0), AutoTokenizer.from_pretrained(MODEL)
    words = draw.sample(WORDS, 6)
    lines = [f"line {word}: {draw.randrange(1000, 10000)}" for word in words]
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    return model, tokenizer("\n".join([*lines, "?", f"line {words[3]}: "]), return_tensors="pt")


@pytest.mark.parametrize(
    "method",
    [
        {"method": "kivi", "bits": 4, "residual": 32},
        {"method": "zipcache", "recompress": 32},
        pytest.param({"method": "kivi", "bits": 2, "residual": 32}, marks=pytest.mark.slow),
    ],
    ids=lambda method: "-".join(map(str, method.values())),
)
def test_the_embedded_model(method, embedded, both):
    # A rounding of one layer may push a value of the next over the border of two codes.
    check(both(*embedded, method, max_new_tokens=2), tolerance=0.01, same=False)


@pytest.mark.full
@pytest.mark.parametrize("name", ["kivi-2-short", "zipcache-short", "streaming_llm-original"])
def test_a_sliding_window(name, both):
    check(both(small("mistral-sliding"), left_padded(PROMPTS), BY_NAME[name]))


@pytest.mark.full
@pytest.mark.parametrize("name", ["rtn-4", "zipcache-short"])
def test_a_soft_cap(name, both):
    """And a scale of its own."""
    model = small("gemma2", layer_types=["full_attention"])
    check(both(model, left_padded(PROMPTS), BY_NAME[name]))


@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"speculative": False}),
        ("llama", {"residual": {"keys": 32, "values": 31}}),  # windows of keys and values apart
        ("mistral-sliding", {}),
        pytest.param("mistral-sliding", {"speculative": False}, marks=pytest.mark.slow),
        pytest.param("gemma2", {}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_fetched_tokens(family, changes, both):
    """In one launch with the window and the new tokens; and by what all tokens got, others are fetched, as plainly."""
    model = small(family, **({"layer_types": ["full_attention"]} if family == "gemma2" else {}))
    method = {"method": "specache", "k": 16, "residual": 32, **changes}
    mine = check(both(model, left_padded(PROMPTS), method, everything=True))
    assert FETCHING | {"hide"} <= set(mine.launched) and not mine.launched["merge"]


@pytest.mark.full
@pytest.mark.parametrize("name", ["kivi-2-short", "mikv-8-2"])
def test_beams(name, both):
    asked = {"num_beams": 2, "num_return_sequences": 2, "max_new_tokens": 3}
    check(both(small(), left_padded([70]), BY_NAME[name], **asked))


@pytest.mark.full
@pytest.mark.parametrize("name", ["kivi-2-short", "h2o"])
def test_drafts(name, both):
    """Several tokens are looked up, attended at once and partly taken back."""
    inputs = left_padded([100])
    inputs["input_ids"][:, 50:] = inputs["input_ids"][:, :50]  # something to look up
    mine = check(both(small(), inputs, BY_NAME[name], prompt_lookup_num_tokens=3))
    assert mine.tokens.shape[1] == 100 + NEW


@pytest.mark.full
@pytest.mark.parametrize(
    "name",
    [
        "kivi-3-short",
        "rtn-2",
        "h2o",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("zipcache-short", "mikv-8-2")),
    ],
)
def test_several_columns(name, monkeypatch):
    """Chunks of three to five tokens behind a prompt, one of them padded."""
    alone(monkeypatch, *ATTENTION)
    monkeypatch.setattr(module_of("attend"), "_programs", lambda device: 2)
    model, inputs = small(), left_padded([82, 61])
    ids, mask, found = inputs["input_ids"], inputs["attention_mask"], []
    for way in ("reference", "triton"):
        monkeypatch.setenv("CALIB_KERNELS", way)
        with monkeypatch.context() as patched, BY_NAME[name].open(model) as cache, torch.no_grad():
            launches = watch(patched, "attend")
            logits, at = [], 0
            for size in (70, 5, 3, 4):
                stop = at + size
                positions = (mask[:, :stop].cumsum(-1) - 1).clamp(min=0)[:, at:]
                part = model(
                    ids[:, at:stop], attention_mask=mask[:, :stop], position_ids=positions, past_key_values=cache
                )
                logits.append(part.logits)
                at = stop
            kept = [stored(cache, row) for row in range(2)]
        real = [part[mask[:, at : at + part.shape[1]].bool()] for part, at in zip(logits, (0, 70, 75, 78), strict=True)]
        found.append(Outcome(ids, torch.cat(real), kept, counts(launches)))
    mine = check(found)
    assert {launch.arguments["query_rows"] for launch in launches} == {10, 6, 8}
    assert mine.launched["attend"] >= 3


@pytest.mark.full
@pytest.mark.parametrize("name", ["kivi-3-short", "zipcache-short"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_models_of_16_bits(name, dtype, both):
    """Queries and weights are rounded to 11 bits where they meet codes, and the output to the model's."""
    check(both(small(dtype=dtype), left_padded(PROMPTS), BY_NAME[name]), tolerance=FORWARD[dtype], same=False)


@pytest.mark.parametrize(("value", "said"), [("trition", "'trition'"), ("triton", "TRITON_INTERPRET=1")])
def test_what_the_variable_cannot_ask_for(value, said, monkeypatch):
    """A wrong word, and kernels that no device here runs."""
    monkeypatch.setenv("CALIB_KERNELS", value)
    monkeypatch.delenv("TRITON_INTERPRET")
    model = small()
    with compress(model, "rtn") as cache, pytest.raises(RuntimeError) as error:
        generate(model, left_padded([9]), cache, max_new_tokens=2)
    assert said in message(error) and "CALIB_KERNELS" in message(error)


@pytest.mark.full
def test_a_command_says_so_in_one_line(monkeypatch):
    """In a process of its own, as a person would call it."""
    monkeypatch.setenv("CALIB_KERNELS", "triton")
    monkeypatch.delenv("TRITON_INTERPRET")
    called = "import sys; from calib.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", called, "generate", "--model", MODEL, "--method", "rtn", "--prompt", "a"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    (line,) = done.stderr.strip().splitlines()
    assert "CALIB_KERNELS=triton" in line and "TRITON_INTERPRET=1" in line
