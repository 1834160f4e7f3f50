"""docs/methods has one page per method, whose options, defaults, paper, bits and results agree with the code and the committed
runs."""

import json
import re
from dataclasses import fields
from functools import cache
from typing import Any

import pytest
import torch
import yaml
from csr.scenarios import dictionaries
from documented import ROOT, text_of
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from calib.method_catalogue import catalogue
from calib.runtime import compress
from calib.runtime.methods import METHODS, build
from calib.runtime.methods.corrections import Corrections
from calib.runtime.methods.paper_counting import CountedCache

PAGES = {name: f"docs/methods/{name}.md" for name in METHODS}
INDEX = "docs/methods/README.md"
OPTIONS = {**METHODS, "corrections": Corrections}
COLUMNS = ["row", "answers", "perplexity", "KL", "bits per value", "marginal bits"]


def table(text: str, heading: str) -> list[list[str]]:
    """Cells of the first table below a heading, without the table's header."""
    lines = text.partition(f"\n{heading}\n")[2].splitlines()
    rows: list[list[str]] = []
    for line in lines:
        if line.startswith("#") or (rows and not line.startswith("|")):
            break
        if line.startswith("|"):
            rows.append([cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip("|"))])
    return rows[2:]


def facts(name: str) -> dict[str, str]:
    """The table at the top of a page."""
    return dict(re.findall(r"^\| (\w.*?) \| (.+) \|$", text_of(PAGES[name]).partition("\n## ")[0], re.M))


@cache
def cells(run: str) -> dict[tuple[str, str], dict[str, Any]]:
    content = json.loads((ROOT / run).read_text(encoding="utf-8"))
    return {(cell["name"], cell["column"]): cell for cell in content["cells"]}


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    """The model of the pages' marginal bits: one layer with 8 KV heads of 128 channels, bfloat16."""
    shape = {"num_hidden_layers": 1, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 128}
    config = LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=64, **shape)
    return LlamaForCausalLM(config).bfloat16().eval()


def test_every_method_has_a_page_and_a_row_of_the_index():
    pages = {path.stem for path in (ROOT / "docs/methods").glob("*.md")}
    assert pages == {*METHODS, "corrections", "README"}
    index = re.findall(r"^\| \[`(\w+)`\]\((\w+)\.md\)", text_of(INDEX), re.M)
    assert sorted(index) == [(name, name) for name in sorted(METHODS)]


@pytest.mark.parametrize("name", OPTIONS)
def test_the_options_of_a_page_are_the_methods(name):
    """The table lists all fields of the class in order, with their defaults, and a range and a meaning for each."""
    rows = table(text_of(f"docs/methods/{name}.md"), "## Options")
    assert [row[0].strip("`") for row in rows] == [field.name for field in fields(OPTIONS[name])]
    for row, field in zip(rows, fields(OPTIONS[name]), strict=True):
        assert row[1] == f"`{field.default!r}`".replace("'", '"'), row
        assert row[2] and row[3], row


@pytest.mark.parametrize("name", METHODS)
def test_a_page_says_whether_a_fit_is_needed_and_names_paper_and_source(name):
    entry, found, text = catalogue()[name], facts(name), text_of(PAGES[name])
    assert found["name"] == f"`{name}`" and found["needs a fit"] == entry.fit
    short = {"no fit": "no", "a fit is optional": "optional", "needs a fit": "needed"}[entry.fit]
    assert re.search(rf"^\| \[`{name}`\].* \| {short} \|$", text_of(INDEX), re.M)
    assert METHODS[name].__name__ in (ROOT / found["source"].strip("`")).read_text(encoding="utf-8")
    link = entry.link.replace("docs/", "../") if entry.link else ""
    assert link in text and ("arxiv.org" in found["paper"]) == link.startswith("http")
    for heading in ("What it does", "Use it", "Options", "What it costs", "Results"):
        assert f"\n## {heading}\n" in text


@pytest.mark.parametrize("name", [name for name in METHODS if catalogue()[name].fit != "needs a fit"])
def test_marginal_bits_of_the_default_options(name, model):
    with compress(model, name) as cache, torch.no_grad():
        model(torch.arange(256)[None] % 64, past_key_values=cache)
        bits = f"{cache.memory().marginal_bits + 1e-9:.2f}"
    assert facts(name)["marginal bits, default options"] == bits
    assert re.search(rf"^\| \[`{name}`\].* \| {bits} \|[^|]*\|$", text_of(INDEX), re.M)


def test_what_a_code_of_each_width_costs(model):
    shown = re.search(r"^\| bits a value \|(.*)\|$", text_of(INDEX), re.M)[1].split("|")
    for bits, cost in enumerate(map(float, shown), 1):
        with compress(model, "rtn", bits=bits) as cache, torch.no_grad():
            model(torch.arange(256)[None] % 64, past_key_values=cache)
            assert cache.memory().marginal_bits - 32 / 128 == pytest.approx(cost, abs=0.005), bits
    assert bits == 8


@pytest.mark.full
def test_bits_of_csr_as_published():
    """For the shapes of the embedded model; random dictionaries suffice."""
    model = AutoModelForCausalLM.from_pretrained(ROOT / "artifacts/tiny-llama", dtype="bfloat16")
    heads, artifact = model.config.num_key_value_heads, dictionaries(model, 256, value_chunks=2)
    files = {"default": "csr.yaml", "published": "csr_paper.yaml"}
    for label, *shown in table(text_of(PAGES["csr"]), "### Its bits"):
        options = yaml.safe_load((ROOT / "configs/methods" / files.pop(label)).read_text(encoding="utf-8"))
        with compress(model, options.pop("method"), artifact, **options) as cache, torch.no_grad():
            model(torch.arange(550)[None] % 256, past_key_values=cache)
            memory, counted = (
                cache.memory(),
                CountedCache(model.config.head_dim, heads * model.config.head_dim, 550, 550),
            )
        options.pop("corrections", None)  # the paper does not count outliers
        found = [memory.marginal_bits, build("csr", options).paper_bits(counted), memory.bits_per_value]
        found += [16 * memory.by_kind[kind] / memory.dynamic_bytes for kind in ("tables", "dictionary")]
        assert shown == [f"{figure:.2f}" for figure in found], label
    assert not files


@pytest.mark.parametrize("name", OPTIONS)
def test_results_are_those_of_the_run_that_the_page_names(name):
    text = text_of(f"docs/methods/{name}.md")
    rows, results = table(text, "## Results"), text.partition("\n## Results\n")[2]
    run = re.search(r"`(benchmarks/results/\w+\.json)`", results)[1]
    assert f"| {' | '.join(COLUMNS)} |" in results and rows
    for label, answers, perplexity, divergence, bits, marginal in rows:
        row = label.strip("`")
        found = {column: cells(run)[row, column] for column in ("60 lines", "perplexity", "agreement")}
        assert name in ("corrections", found["60 lines"]["method"])
        exact, sizes = found["60 lines"]["figures"], found["60 lines"]["sizes"]
        assert answers == f"{exact['exact']:.2f} ({exact['low']:.2f}-{exact['high']:.2f})"
        assert perplexity in ("", f"{found['perplexity']['figures']['perplexity']:.2f}")
        assert divergence in ("", f"{found['agreement']['figures']['kl']:.4f}")
        assert (bits, marginal) == (f"{sizes['bits_per_value']:.2f}", f"{sizes['marginal_bits']:.2f}")


LENGTHS = {
    "`full`": "full",
    '`infllm`, `prefill="exact"`': "infllm, exact",
    "`infllm`": "infllm, blocks",
    "`infllm`, `fetched=0`": "infllm, blocks, none fetched",
}


def test_infllm_beyond_the_trained_context_is_as_it_was_measured():
    """Both tables have the committed figures, cell by cell, and the text names the options of the run."""
    run = json.loads((ROOT / "benchmarks/results/infllm_lengths.json").read_text(encoding="utf-8"))
    text = text_of(PAGES["infllm"]).partition("\n## Beyond the trained context\n")[2]
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| `")]
    assert [row[0] for row in rows] == [*LENGTHS, *LENGTHS]
    for number, (row, *printed) in enumerate(rows):
        cells = run["perplexity" if number < len(LENGTHS) else "needles"][LENGTHS[row]].values()
        found = [
            f"{cell['perplexity']:.2f}" if "perplexity" in cell else "{exact:.2f} ({low:.2f}-{high:.2f})".format(**cell)
            for cell in cells
        ]
        assert printed == found, row
    own = run["settings"]["infllm, blocks"]
    named = ("initial", "window", "block", "fetched", "chunk")
    assert f"`{', '.join(f'{name}={own[name]}' for name in named)}`" in text
    assert f"longer than {own['initial'] + own['window'] + own['block'] + own['chunk'] - 1})" in text
