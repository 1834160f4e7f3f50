"""SpeCache's k from a link, a step's time and a budget: by hand, in the record, and in a cache."""

from pathlib import Path

import pytest
import torch
from cases import calibrated_artifact
from toy_language_model import save_toy, toy_model

from calib import cli
from calib.runtime import Artifact, compress
from calib.runtime.methods import Geometry
from calib.runtime.methods.tuned import choices
from calib.tune.fetched import Link, fetched_within

SMALL = ["--length", "96", "--sequences", "2", "--seed", "3", "--group", "32", "--residual", "32"]
GEOMETRY = Geometry(layers=7, kv_heads=2, head_dim=64)  # a pair of 16-bit numbers: 256 bytes


@pytest.mark.arithmetic
@pytest.mark.parametrize(
    ("link", "context", "left", "given", "k"),
    [
        # A megabyte a step, 5 layers of 2 heads, 4 rows: 97.66 pairs of each. Over 1,000 tokens one takes 8 x 260 / 128,000 bits.
        (Link(1.0, 1.0, 4), 1000, 2.0, None, 97),
        (Link(0.5, 2.0, 4), 1000, 2.0, None, 97),
        (Link(1.0, 1.0, 1), 1000, 10.0, None, 390),
        (Link(1.0, 1.0, 4), 1000, 1.0, None, 61),  # 1 / 0.01625 = 61.5
        (Link(1.0, 1.0, 4), 1000, 0.01625, None, 1),
        (Link(1.0, 1.0, 4), 1000, 0.0, None, 0),
        (Link(1.0, 1.0, 4), 1000, -0.5, None, 0),  # the search reports the budgets that are possible
        (Link(1.0, 1.0, 4), 50, 100.0, None, 50),  # there are no more
        (Link(rows=4), 1000, 0.1, 64, 64),  # a given k is not chosen
        (Link(rows=4), 50, 0.1, 64, 64),  # of which a sequence has 50
    ],
)
def test_by_hand(link, context, left, given, k):
    found = fetched_within("k", given, link, context, 5, GEOMETRY, 2, left)
    assert found.k == k and found.option == "k" and found.context == context
    assert found.bits == pytest.approx(min(k, context) * 0.01625 * 1000 / context)
    assert found.step_bytes == min(k, context) * 5 * 2 * 256 * link.rows


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """A model and an artifact with sensitivities."""
    folder = tmp_path_factory.mktemp("tune")
    save_toy(folder / "llama")
    calibrated_artifact(toy_model()).save(folder / "fitted.calib.safetensors")
    return folder


def tune(toy: Path, *more: str) -> int:
    paths = {
        "model": "llama",
        "artifact": "fitted.calib.safetensors",
        "output": "tuned.calib.safetensors",
        "logs": "logs",
    }
    words = [word for name, path in paths.items() for word in (f"--{name}", str(toy / path))]
    return cli.main(["tune", "--method", "specache", *words, *SMALL, *more])


@pytest.mark.full
def test_k_and_the_copy_share_a_budget(toy, capsys):
    """The low-bit copy gets what the pairs leave of the budget, layer by layer, and a cache holds both."""
    assert tune(toy, "--bits", "5", "3", "--bandwidth", "0.05", "--step_ms", "0.4", "--context", "200") == 0
    shown = capsys.readouterr().out
    tuned, model = Artifact.load(toy / "tuned.calib.safetensors"), toy_model()
    found = {choice.budget: choice for choice in choices(tuned)}
    assert sorted(found) == [3, 5]
    config = model.config
    layers, heads, width = config.num_hidden_layers, config.num_key_value_heads, config.head_dim
    size = model.dtype.itemsize
    arriving = int(0.05e9 * 0.4e-3 // (layers * heads * 2 * width * size))
    each = 8 * (2 * width * size + 4) / (2 * width * 200)
    for budget, choice in found.items():
        k, copy = choice.options["k"], sum(layer["bits"] for layer in choice.predicted["layers"]) / layers
        assert choice.options == {"group": 32, "residual": 32, "k": k} and 0 < k <= arriving
        assert choice.predicted["bits"] == pytest.approx(copy + k * each)
        assert choice.predicted["bits"] <= budget
        assert choice.predicted["fetched"]["bits"] == pytest.approx(k * each)
        assert choice.predicted["uniform"]["bits"] <= budget
        assert all(set(own) == {"bits", "clip"} for own in choice.layers) and f"k={k}" in shown
        with compress(model, "specache", tuned, tuned=budget) as cache:
            ids = torch.randint(3, 259, (1, 150), generator=torch.Generator().manual_seed(0))
            model.generate(ids, past_key_values=cache, max_new_tokens=4, do_sample=False, eos_token_id=None)
            memory = cache.memory()
        assert memory.marginal_bits == pytest.approx(copy)
        values = layers * heads * 2 * width
        assert memory.by_kind["fetched"] == pytest.approx(k * each * values * 200 / 8 + 8 * layers)
    assert found[5].options["k"] == arriving > found[3].options["k"]  # the cheapest copy must have room


def test_k_that_is_given(toy):
    """The bits of its pairs count towards the budget as well."""
    assert tune(toy, "--bits", "5", "--k", "16", "--context", "200") == 0
    (choice,) = choices(Artifact.load(toy / "tuned.calib.safetensors"))
    copy = sum(layer["bits"] for layer in choice.predicted["layers"]) / len(choice.layers)
    assert choice.options["k"] == 16 and copy < choice.predicted["bits"] <= 5
    assert choice.predicted["fetched"]["k"] == 16


LINK = ["--bandwidth", "1", "--step_ms", "1"]


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (
            ["--bits", "3"],
            "fetches k exact pairs for each step: give --bandwidth and --step_ms, from which k follows, or --k",
        ),
        (["--bits", "3", "--bandwidth", "1"], "give --bandwidth and --step_ms"),
        (["--bits", "3", "--k", "8", *LINK], "--k is given, and --bandwidth and --step_ms would choose it; leave one"),
        (["--bits", "3", "--bandwidth", "0", "--step_ms", "1"], "--bandwidth 0 must be above 0, in GB/s, such as 20"),
        (["--bits", "3", "--bandwidth", "1", "--step_ms", "nan"], "--step_ms nan must be above 0, in milliseconds"),
        (["--bits", "3", "--rows", "0", *LINK], "--rows must be at least 1, got 0"),
        (["--bits", "3", "--context", "0", *LINK], "--context must be at least 1, got 0"),
        (["--bits", "1", *LINK], "--bits 1: 'specache' takes 2.000 ... "),
        (["--bits", "3", "--k", "64", "--context", "64"], "--bits 3: 'specache' takes "),
        (["--bits", "3", "--k", "-1"], "k must be a whole number"),
        (["--bits", "3", "--method", "kivi", *LINK], "are for methods that fetch from the host, and 'kivi' does not"),
        (["--bits", "3", "--method", "kivi", "--context", "9"], "and 'kivi' does not; leave them out"),
    ],
)
def test_a_request_that_cannot_be_met(toy, more, told, capsys):
    assert tune(toy, *more) == 2
    assert told in capsys.readouterr().err.strip().splitlines()[-1]
