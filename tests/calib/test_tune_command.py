"""`calib tune` from the command line to a generation: the record, layers of different options in one cache, refusals."""

import csv
import json
import re
from dataclasses import replace

import pytest
import torch
from cases import calibrated_artifact
from one_line import message
from toy_language_model import save_text, save_toy, toy_model

from calib import cli
from calib.runtime import Artifact, compress
from calib.runtime.artifact.artifact import ArtifactError
from calib.runtime.methods import build, options_asked
from calib.runtime.methods.tuned import Choice, choices, with_choices

SMALL = ["--length", "96", "--sequences", "2", "--seed", "3"]
KIVI = ["--method", "kivi", "--group", "32", "--residual", "32", "--statistics", "prompt"]


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """A model, a text and an artifact with sensitivities."""
    folder = tmp_path_factory.mktemp("tune")
    save_toy(folder / "llama")
    save_text(folder / "text.txt")
    calibrated_artifact(toy_model()).save(folder / "fitted.calib.safetensors")
    return folder


def words(toy, *more, output="tuned.calib.safetensors"):
    paths = ["--model", toy / "llama", "--artifact", toy / "fitted.calib.safetensors", "--output", toy / output]
    return ["tune", *map(str, paths), "--logs", str(toy / "logs"), *SMALL, *more]


@pytest.fixture(scope="module")
def tuned(toy):
    """Two budgets of kivi, on the text."""
    page = ["--html", str(toy / "page.html"), "--text", str(toy / "text.txt")]
    assert cli.main(words(toy, *KIVI, "--bits", "3.3", "2.5", *page)) == 0
    return Artifact.load(toy / "tuned.calib.safetensors")


def test_the_record(toy, tuned):
    found = choices(tuned)
    assert [(choice.method, choice.budget) for choice in found] == [("kivi", 2.5), ("kivi", 3.3)]
    for choice in found:
        assert dict(choice.options) == {"group": 32, "residual": 32, "statistics": "prompt"}
        assert len(choice.layers) == 3 and all(set(own) == {"bits", "clip"} for own in choice.layers)
        layers = choice.predicted["layers"]
        assert choice.predicted["bits"] == pytest.approx(sum(layer["bits"] for layer in layers) / 3)
        assert choice.predicted["bits"] <= choice.budget
        assert choice.predicted["loss"] == pytest.approx(sum(layer["loss"] for layer in layers))
        assert choice.predicted["loss"] <= choice.predicted["uniform"]["loss"]
        assert choice.measured_on["text"] == "text.txt" and choice.measured_on["sequences"] == 2
    assert tuned.tensors.keys() == Artifact.load(toy / "fitted.calib.safetensors").tensors.keys()


def test_the_page_and_the_log(toy, tuned):
    page = (toy / "page.html").read_text()
    assert '<svg class="scatter"' in page and "On the front" in page and "kivi at 2.5 bits" in page
    (front,) = (toy / "logs").rglob("tune-front.csv")
    points = [tuple(map(float, row)) for row in list(csv.reader(front.open()))[1:]]
    assert points == sorted(points) and [loss for _, loss in points] == sorted((p[1] for p in points), reverse=True)
    assert list((toy / "logs").rglob("calibration-*")) and list((toy / "logs").rglob("report-*"))


@pytest.mark.full
def test_the_same_request_gives_the_same_file_and_a_second_method_joins(toy, tuned):
    """Without a text, on what the model itself generates; into the artifact that was tuned before."""
    first, again, both = (toy / f"{name}.calib.safetensors" for name in ("first", "again", "both"))
    for path in (first, again):
        path.write_bytes((toy / "fitted.calib.safetensors").read_bytes())
        own = words(toy, "--method", "h2o", "--bits", "8", output=path.name)
        own[own.index("--artifact") + 1] = str(path)
        own = own[: own.index("--output")] + own[own.index("--output") + 2 :]
        assert cli.main(own) == 0
    assert first.read_bytes() == again.read_bytes()
    both.write_bytes((toy / "tuned.calib.safetensors").read_bytes())
    own = words(toy, "--method", "h2o", "--bits", "8", output=both.name)
    own[own.index("--artifact") + 1] = str(both)
    assert cli.main(own) == 0
    found = choices(Artifact.load(both))
    assert [(choice.method, choice.budget) for choice in found] == [("h2o", 8), ("kivi", 2.5), ("kivi", 3.3)]
    assert found[0].measured_on["text"] == "generated" and found[0].layers == [{}, {}, {}]


def test_a_cache_has_each_layers_options(tuned):
    model = toy_model()
    (choice,) = (choice for choice in choices(tuned) if choice.budget == 3.3)
    with compress(model, "kivi", tuned, tuned=3.3) as cache:
        for layer, own in zip(cache.compressed, choice.layers, strict=True):
            assert layer.plan.keys.codec.bits == layer.plan.values.codec.bits == own["bits"]
        assert len({own["bits"] for own in choice.layers}) > 1
        ids = torch.randint(3, 259, (1, 100), generator=torch.Generator().manual_seed(0))
        model.generate(ids, past_key_values=cache, max_new_tokens=2, do_sample=False)
        memory = cache.memory()
    assert memory.marginal_bits == pytest.approx(choice.predicted["bits"], rel=1e-9)
    assert memory.predicted_bytes == memory.measured_bytes
    assert options_asked(build("kivi", {"tuned": 3.3})) == {"tuned": 3.3}
    assert options_asked(build("specache", {"low": {"method": "kivi", "tuned": 3.3}}))["low"] == {
        "method": "kivi",
        "tuned": 3.3,
    }


MIXED = {
    "kivi": ({"group": 32, "residual": 32}, [{"bits": 1}, {"bits": 4}, {"bits": 2, "clip": 0.8}]),
    "zipcache": (
        {"ratio": 0.3, "recompress": 20},
        [{"tiers": [[8, 0.5], [4, 0.5]]}, {"tiers": [[16, 0.5], [1, 0.5]]}, {"tiers": [[4, 0.5], [3, 0.5]]}],
    ),
    "mikv": ({"ratio": 0.3}, [{"important": 16}, {"important": 4, "retained": 3}, {"important": 8, "retained": 1}]),
    "gear": ({"block": 20}, [{"rank": 0, "outliers": 0.0}, {"rank": 4, "bits": 2}, {"rank": 2, "outliers": 0.05}]),
    "csr": ({"window": 16}, [{"sparsity": 2}, {"sparsity": 8, "coefficients": 4}, {"sparsity": 6}]),
}


@pytest.mark.full
@pytest.mark.parametrize("method", MIXED)
def test_layers_of_different_options_in_a_batch(method):
    """Greedy continuations of rows in a padded batch, as of each row alone; a layer stores what it does in a cache of its own."""
    model = toy_model()
    shared, own = MIXED[method]
    artifact = with_choices(calibrated_artifact(model), [Choice(method, 4.0, shared, own, {}, {})])
    draw = torch.Generator().manual_seed(1)
    rows = [torch.randint(3, 259, (1, length), generator=draw) for length in (120, 75)]
    ids = torch.zeros(2, 120, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, tokens in enumerate(rows):
        ids[row, -tokens.shape[1] :], mask[row, -tokens.shape[1] :] = tokens[0], 1

    def continued(ids, mask):
        with compress(model, method, artifact, tuned=4.0) as cache:
            out = model.generate(
                ids, attention_mask=mask, past_key_values=cache, max_new_tokens=30, do_sample=False, eos_token_id=None
            )
            memory = cache.memory()
        assert memory.predicted_bytes == memory.measured_bytes
        return out[:, ids.shape[1] :]

    together = continued(ids, mask)
    for row, tokens in enumerate(rows):
        assert torch.equal(continued(tokens, torch.ones_like(tokens))[0], together[row])
    whole = rows[0]
    with compress(model, method, artifact, tuned=4.0) as cache, torch.no_grad():
        model(whole, past_key_values=cache)
        for number, layer in enumerate(
            cache.compressed
        ):  # a prompt is attended exactly, whatever the other layers store
            with compress(model, method, artifact, **{**shared, **own[number]}) as uniform:
                model(whole, past_key_values=uniform)
                assert layer.store.footprint() == uniform.compressed[number].store.footprint()


def with_record(**changes):
    artifact = calibrated_artifact(toy_model())
    artifact = with_choices(artifact, [Choice("kivi", 2.5, {}, [{"bits": 2}] * 3, {}, {})])
    record = json.loads(json.dumps(artifact.provenance["tuned"]))
    record.update({name: value for name, value in changes.items() if name == "version"})
    record["choices"][0].update({name: value for name, value in changes.items() if name != "version"})
    return replace(artifact, provenance={**artifact.provenance, "tuned": record})


@pytest.mark.parametrize(
    ("changes", "asked", "told"),
    [
        ({"version": 2}, {"tuned": 2.5}, "provenance.tuned has version 2, expected 1; write it anew with `calib tune`"),
        ({"layers": [{}]}, {"tuned": 2.5}, "its field 'layers' is malformed, expected one entry for each of 3 layers"),
        ({"layers": [{}, {}, 3]}, {"tuned": 2.5}, "its field 'layers' is malformed"),
        ({"options": 3}, {"tuned": 2.5}, "its field 'options' is malformed"),
        ({"more": 3}, {"tuned": 2.5}, "expected ['budget', 'layers'"),
        ({"layers": [{}, None, {}]}, {"tuned": 2.5}, "the artifact has no tuned options for layer 1"),
        (
            {"layers": [{}, {"residual": 64}, {}]},
            {"tuned": 2.5},
            "the options of layers 0 and 1 keep different numbers of tokens",
        ),
        (
            {"layers": [{}, {"bit": 64}, {}]},
            {"tuned": 2.5},
            "provenance.tuned gives 'kivi' options that it does not have: bit;",
        ),
        (
            {},
            {"tuned": 2.4},
            "this artifact has no choice of that budget (there are: kivi at 2.5); take one of them, or",
        ),
        ({}, {"tuned": "x"}, "tuned must be a budget of `calib tune` in bits per value, such as 2.5, got 'x'"),
        ({}, {"tuned": 2.5, "bits": 2}, "tuned=2.5 stands for all options of 'kivi', got bits besides; leave it out"),
    ],
)
def test_a_record_that_cannot_be_followed(changes, asked, told):
    with pytest.raises(ValueError, match=re.escape(told)) as error:
        compress(toy_model(), "kivi", with_record(**changes), **asked)
    assert message(error)


def test_tuned_without_an_artifact_and_of_a_method_without_a_grid():
    with pytest.raises(ValueError, match="needs the artifact that `calib tune` wrote"):
        compress(toy_model(), "kivi", tuned=2.5)
    with pytest.raises(ValueError, match="unknown option 'tuned' of method 'full'"):
        compress(toy_model(), "full", tuned=2.5)
    assert choices(calibrated_artifact(toy_model())) == []
    with pytest.raises(ArtifactError):
        choices(with_record(version=None))


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (["--method", "kivvi", "--bits", "2"], "did you mean 'kivi'?"),
        (["--method", "full", "--bits", "2"], "method 'full' has no option that a budget could choose"),
        ([*KIVI, "--bits", "1"], "--bits 1: 'kivi' takes 2.000 ... "),
        ([*KIVI, "--bits", "-1"], "--bits -1 must be above 0 and at most 16"),
        (
            [*KIVI, "--bits", "2", "--rank", "3"],
            "unknown option '--rank' (method 'kivi' has basis, clip, group, key_bias, residual, statistics)",
        ),
        ([*KIVI, "--bits", "2", "--length", "400"], "--length 400: this model was made for 256 tokens"),
        ([*KIVI, "--bits", "2", "--html", "page.txt"], "--html page.txt: must name a file that ends in .html"),
        ([*KIVI, "--bits", "2", "--artifact", "nope"], "artifact 'nope' is no file"),
        ([*KIVI, "--bits", "2", "--sequences", "0"], "--sequences must be at least 1, got 0"),
    ],
)
def test_a_request_that_cannot_be_met(toy, more, told, capsys):
    assert cli.main(words(toy, *more, output="none.calib.safetensors")) == 2
    shown = capsys.readouterr().err.strip().splitlines()
    assert told in shown[-1] and not (toy / "none.calib.safetensors").exists()


def test_an_artifact_without_sensitivities(toy, capsys):
    artifact = calibrated_artifact(toy_model())
    rest = {name: tensor for name, tensor in artifact.tensors.items() if ".klt." not in name}
    replace(artifact, tensors=rest).save(toy / "old.calib.safetensors")
    assert cli.main(words(toy, *KIVI, "--bits", "3", "--artifact", str(toy / "old.calib.safetensors"))) == 2
    told = capsys.readouterr().err
    assert "artifact 'old.calib.safetensors' has no 'keys.klt.basis'" in told and "`calib fit`" in told
