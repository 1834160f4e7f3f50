"""Whole generations through attention's kernels, interpreted, against the same generations through plain torch.

Both give the same tokens from nearly the same logits. Keys and values of a model with one layer do not depend on attention, so that
what is stored in the end is the same bit for bit; only evictions and demotions depend on attention mass, which is rounded.
"""

import random
import subprocess
import sys
from dataclasses import dataclass, replace

import pytest
import torch
from attention_kernel import WITHOUT, which
from cases import BY_NAME, CASES
from launches import alone, counts, module_of, watch
from layer_walk import differing, stored
from one_line import message
from tolerances import FORWARD
from toy_models import generate, left_padded, random_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from calib.documents.words import WORDS
from calib.runtime import compress

MODEL = "artifacts/tiny-llama"
PROMPTS = [100, 61]
NEW = 4  # tokens; the interpreter takes its time

# Kernels of attention by the operation that launches them.
ATTENTION = {"attend": "attend", "desparsify_attend": "_attend"}

# And the operation for outliers beside codes.
SERVED = [*ATTENTION, "outliers"]

# One case of every method whose pages a kernel reads (`which`).
QUICK = [
    "full", "rtn-4", "kivi-3-short", "kivi-2-calibrated", "zipcache-16-4-2", "mikv-8-2", "h2o", "tova", "snapkv", "streaming_llm",
    "gear-60", "gear_l", "uniform", "group_wise", "outlier_reduced", "csr-paper", "klt-short", "klt-after-rope", "klt-predicted",
    "klt-trellis", "specache", "infllm-original", "oscar",
]  # fmt: skip

# Kernels of a step that fetches tokens by their mass, besides `hide`, which masks those that are fetched already.
FETCHING = {"attend", "exact", "sum_rows", "largest", "exchange_entries", "gather_rows"}

# Relative to the largest logit: kernels round to 22 bits, where float32 has 24: 4 times the tolerance of a float32 forward.
ROUNDED = 4 * FORWARD[torch.float32]

# The tolerance of mass, a sum of weights that are rounded so.
MASS = 2**-14


@dataclass
class Outcome:
    """The results of a run in plain torch or by kernels, and the kernels that it launched."""

    tokens: torch.Tensor
    logits: torch.Tensor
    kept: list[dict[str, torch.Tensor]]
    launched: dict[str, int]


@pytest.fixture
def both(monkeypatch):
    """Runs a generation in plain torch and by kernels: by those of the operations `served`, or of all, with `everything`."""

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
    """Asserts the same tokens, logits within `tolerance` of the largest, and with `same` the same stored parts."""
    plain, mine = outcomes
    assert not plain.launched
    # `exact` attends to the window and new tokens, also where no kernel reads pages.
    assert mine.launched.get(ATTENTION[launched]) if launched else set(mine.launched) <= {"exact"}
    assert torch.equal(mine.tokens, plain.tokens)
    assert (mine.logits - plain.logits).abs().max() <= tolerance * plain.logits.abs().max()
    if same:
        for found, expected in zip(mine.kept, plain.kept, strict=True):
            assert differing(found, expected, mass=MASS) == []
    return mine


def small(family="llama", dtype=torch.float32, **changes):
    """A toy model of one layer, or as many as `changes` say."""
    return random_model(family, dtype, **{"num_hidden_layers": 1} | changes)


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
    """All by kernels. Pursuit may choose either of two atoms with nearly equal products, so that what is stored may differ."""
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
    """Its coefficients are read in the launch for codes, which writes scores only if outliers of values need them."""
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
    """Outlier lists of prompts (records) and of blocks (pages), and low-rank coefficients; torch computes what no kernel does."""
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
    """They are read in the launch for codes, which also mixes keys' codes if values are predicted. Runs of two tiers are merged."""
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
    """One row has fewer heads than the device runs programs: its pages are split into parts, which the window's kernel joins."""
    alone(monkeypatch, *ATTENTION)
    case, model, inputs = BY_NAME["kivi-3-short"], small(), left_padded([140])
    mine = check([outcome(monkeypatch, way, model, inputs, case, {}) for way in ("reference", "triton")])
    assert mine.launched["exact"] == mine.launched["attend"] == NEW - 1 and not mine.launched["merge"]


@pytest.fixture(scope="module")
def embedded():
    """The embedded model, and a prompt of keyed lines that ends by asking for one line's number."""
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
    """Gemma 2 also has its own scale of logits."""
    model = small("gemma2", layer_types=["full_attention"])
    check(both(model, left_padded(PROMPTS), BY_NAME[name]))


@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"speculative": False}),
        ("llama", {"residual": {"keys": 32, "values": 31}}),  # windows of keys and values differ
        ("mistral-sliding", {}),
        pytest.param("mistral-sliding", {"speculative": False}, marks=pytest.mark.slow),
        pytest.param("gemma2", {}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_fetched_tokens(family, changes, both):
    """They are attended in one launch with the window and new tokens; the next ones, chosen by mass, are those of plain torch."""
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
    """Three drafts are looked up and attended at once, of the prompt and of a step: the first of them is accepted."""
    inputs, model, fed = left_padded([100], seed=159), small(), []
    ids = inputs["input_ids"]
    ids[:, 0] = 72  # what the model says after this prompt
    ids[:, 50:] = ids[:, :50]
    model.register_forward_pre_hook(lambda _, __, named: fed.append(named["input_ids"].shape[1]), with_kwargs=True)
    mine = check(both(model, inputs, BY_NAME[name], prompt_lookup_num_tokens=3, max_new_tokens=5))
    assert mine.tokens.shape[1] == 105 and fed == 2 * [103, 4, 1]


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
    """Queries and weights are rounded to 11 bits before products with codes, and the output to the model's dtype."""
    check(both(small(dtype=dtype), left_padded(PROMPTS), BY_NAME[name]), tolerance=FORWARD[dtype], same=False)


@pytest.mark.parametrize(("value", "said"), [("trition", "'trition'"), ("triton", "TRITON_INTERPRET=1")])
def test_what_the_variable_cannot_ask_for(value, said, monkeypatch):
    """An unknown word, and Triton without a device that runs it."""
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
