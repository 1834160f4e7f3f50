"""Errors of fp8 keys and values with the exported scales: of a toy model's logits, and the table of docs/engines.md."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from toy_fp8_export import (
    family_model,
    fp8_logits,
    measured_ranges,
    needs_compressed_tensors,
    rounded,
    save_artifact,
)
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.embedded_model.cases import retrieval_batch
from calib.capture.corpus import pack
from calib.capture.generated import retrieval_documents
from calib.capture.model_files import find_model
from calib.commands.export import run
from calib.export.compressed_tensors.scales import scales
from calib.runtime import Artifact

ROOT = Path(__file__).resolve().parents[2]

LARGE, SMALL = 2.0**14, 2.0**-14


def tokens(seed, rows=4, length=96):
    return torch.randint(3, 259, (rows, length), generator=torch.Generator().manual_seed(seed))


def scaled_keys_and_values(model, factors):
    """Multiply KV head h's keys and values by `factors[h]`, and divide the weights of its queries and outputs by it: in exact
    arithmetic the model stays the same."""
    width, group = model.config.head_dim, 2
    per_row = torch.tensor(factors).repeat_interleave(width)[:, None]
    readers = torch.tensor(factors).repeat_interleave(group * width)
    for layer in model.model.layers:
        attention = layer.self_attn
        attention.k_proj.weight.mul_(per_row)
        attention.v_proj.weight.mul_(per_row)
        attention.q_proj.weight.div_(readers[:, None])
        attention.o_proj.weight.div_(readers)
    return model


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A function from `factors` and granularity to the scaled model and the folder exported for it, calibrated on tokens(1)."""
    made = {}

    def export(factors, granularity):
        if (factors, granularity) not in made:
            folder = tmp_path_factory.mktemp("model")
            model = scaled_keys_and_values(family_model("llama"), factors)
            model.save_pretrained(folder / "model")
            artifact = save_artifact(folder / "a.safetensors", model, measured_ranges(model, tokens(1)))
            words = ["--artifact", artifact, "--model", folder / "model", "--output", folder / "out"]
            assert run(["--format", "compressed-tensors", *map(str, words), "--granularity", granularity]) == 0
            made[factors, granularity] = model, folder / "out"
        return made[factors, granularity]

    return export


def error(found, exact):
    return float((found - exact).norm() / exact.norm())


def logit_error(exported, factors, granularity, uncalibrated=False):
    """Error of the logits of tokens that calibration did not see, relative to their norm. `uncalibrated`: all scales are 1."""
    model, folder = exported(factors, granularity)
    tensors = load_file(folder / "model-kv-scales.safetensors")
    if uncalibrated:
        tensors = {name: torch.ones_like(tensor) for name, tensor in tensors.items()}
    with torch.no_grad():
        exact = model(tokens(2)).logits
    return error(fp8_logits(model, tokens(2), tensors), exact)


@pytest.mark.parametrize("granularity", ["tensor", "head"])
@pytest.mark.parametrize("factor", [LARGE, SMALL, 1.0])
def test_logits_are_as_close_whatever_the_size_of_keys_and_values(factor, granularity, exported):
    usual = logit_error(exported, (1.0, 1.0), granularity)
    assert 1e-4 < usual < 0.05  # fp8 rounds a value by a sixteenth of itself at most
    # Factors are powers of two, so scales change by a factor and codes are the same, but for rounding in the model.
    assert logit_error(exported, (factor, factor), granularity) == pytest.approx(usual, rel=0.05)
    if factor != 1:  # with scale 1 large values are clamped to 448, and small ones become 0
        assert logit_error(exported, (factor, factor), granularity, uncalibrated=True) > 10 * usual


def test_a_scale_for_each_head_is_as_good_and_better_where_heads_differ(exported):
    usual = {granularity: logit_error(exported, (1.0, 1.0), granularity) for granularity in ("tensor", "head")}
    assert usual["head"] < 1.2 * usual["tensor"]  # both round relatively: neither is better
    apart = {granularity: logit_error(exported, (LARGE, SMALL), granularity) for granularity in ("tensor", "head")}
    assert apart["head"] == pytest.approx(usual["head"], rel=0.05)
    assert apart["head"] < 0.1 * apart["tensor"]


@pytest.mark.parametrize("granularity", ["tensor", "head"])
def test_compressed_tensors_rounds_with_the_scales_as_we_do(granularity, exported):
    needs_compressed_tensors()
    model, folder = exported((LARGE, SMALL), granularity)
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        theirs = loaded(tokens(2)).logits
    ours = fp8_logits(model, tokens(2), load_file(folder / "model-kv-scales.safetensors"))
    assert error(theirs, ours) < 1e-6
    with torch.no_grad():
        assert error(theirs, model(tokens(2)).logits) > 1e-4  # it did round


def rows_of(document, title):
    """Rows of the table whose header begins with `title`: the first cell as text, the others as numbers."""
    table = document[document.index(title) :].partition("\n\n")[0].splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    return {first: [float(cell) for cell in rest] for first, *rest in cells}


@pytest.mark.full
def test_the_documented_errors(tmp_path):
    """Recompute the table of docs/engines.md: the embedded model, calibrated on documents of keyed lines; errors on other such
    documents and on the text of the licence."""
    model = AutoModelForCausalLM.from_pretrained(find_model("artifacts/tiny-llama"), dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(find_model("artifacts/tiny-llama"))
    seen = torch.tensor(list(pack(retrieval_documents(tokenizer, 0), tokenizer.bos_token_id, 512, 8)))
    artifact = Artifact.load(save_artifact(tmp_path / "a.safetensors", model, measured_ranges(model, seen)))
    cases = retrieval_batch(tokenizer, seed=1, count=8, lines=40)
    licence = tokenizer((ROOT / "LICENSE").read_text(encoding="utf-8"), return_tensors="pt")["input_ids"]
    texts = (cases["input_ids"], licence[:, :2000].view(4, 500))
    with torch.no_grad():
        caches = [model(text).past_key_values.layers for text in texts]
    documented = rows_of((ROOT / "docs" / "engines.md").read_text(encoding="utf-8"), "| scale |")
    assert len(documented) == 7
    for first, numbers in documented.items():
        for stream, column in (("keys", 0), ("values", 2)):
            factor = first.partition(" ")[0]
            chosen = torch.ones(4) if factor == first else scales(artifact, stream, "tensor", float(factor)).flatten()
            for layers, number in zip(caches, numbers[column : column + 2], strict=True):
                stored = [getattr(layer, stream) for layer in layers]
                found = torch.stack(
                    [((x - rounded(x, s)) ** 2).sum() / (x**2).sum() for x, s in zip(stored, chosen, strict=True)]
                )
                assert float(found.mean().sqrt()) == pytest.approx(number, rel=0.02), (first, stream)
