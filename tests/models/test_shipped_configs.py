"""The shipped configurations of `calib fit`: each parses, names its model, and has numbers that fit the model's published sizes."""

import re
from pathlib import Path

import pytest
import yaml
from models.published import PUBLISHED, heads_of, text_of

from calib.capture.model_files import is_hub_name
from calib.capture.shape import Shape
from calib.fit.dictionary_tasks import check_dictionaries
from calib.fit.options import FitCLI

# Options for a machine without GPU, W&B and accelerate.
HERE = ["--trainer.accelerator=cpu", "--trainer.logger=false", "--model.device_map=null"]
SHIPPED = {path.stem: yaml.safe_load(path.read_text()) for path in sorted(Path("configs").glob("*.yaml"))}
FIT = {name: content for name, content in SHIPPED.items() if "path" in content["model"]}
SMALL = {"tiny", "tiny_wikitext", "smollm2"}  # for two cores, on few sequences
MODELS = {name: content for name, content in FIT.items() if name not in SMALL}
LONGEST = 8192  # most atoms of a dictionary: an index of 13 bits, as in the paper for 32 KV heads


def shape_of(name: str) -> Shape:
    """The published sizes of a model."""
    return Shape(*heads_of(PUBLISHED[name]))


def test_every_model_has_its_configuration_and_every_configuration_its_model():
    assert set(MODELS) == set(PUBLISHED)
    assert set(FIT) - set(MODELS) == SMALL
    assert len({content["output"] for content in FIT.values()}) == len(FIT)
    hub = {name: content["model"]["path"] for name, content in MODELS.items() if name != "baichuan2"}
    assert len(set(hub.values())) == len(hub)
    assert all(is_hub_name(path) and path.count("/") == 1 for path in hub.values())
    assert MODELS["baichuan2"]["model"]["path"] == "./baichuan2-7b"  # converted, so no name of the hub


@pytest.mark.parametrize("name", FIT)
def test_it_parses(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cli = FitCLI(["--config", f"{name}.yaml", *HERE])
    assert cli.config.output == FIT[name]["output"]
    assert (cli.model.path, cli.model.dtype_name) == (FIT[name]["model"]["path"], FIT[name]["model"]["dtype"])
    assert cli.model.bits == (1, 2, 3, 4)
    assert (FIT[name]["model"].get("device_map") == "auto") == (name == "llama2_70b")
    for option, value in FIT[name]["data"].items():
        assert cli.config.data[option] == value


@pytest.mark.parametrize("name", MODELS)
def test_the_corpus_is_the_same_for_all(name):
    data, beside = dict(MODELS[name]["data"]), dict(MODELS["llama2"]["data"])
    # Sequences begin at positions up to the model's limit, or 32,768. With frequencies that depend on the length they begin at 0.
    most = min(32768, text_of(PUBLISHED[name])["max_position_embeddings"])
    assert data.pop("positions", None) == (None if name == "phi3_128k" else most)
    assert beside.pop("positions") == 4096 and data == beside and data["length"] <= most
    for part in ("seed_everything", "trainer"):
        assert MODELS[name][part] == MODELS["llama2"][part]
    assert data["name"] == "Salesforce/wikitext" and data["sampled"] == 0.25


@pytest.mark.parametrize("name", MODELS)
def test_the_numbers_are_the_models(name):
    shape, published = shape_of(name), PUBLISHED[name]
    text, model = Path(f"configs/{name}.yaml").read_text(), MODELS[name]["model"]
    assert f"{shape.kv_heads} KV heads of {shape.head_dim}" in text
    for moments in re.findall(r"(\d+) MB of moments", text):
        assert int(moments) == round(8e-6 * shape.layers * shape.kv_heads * shape.head_dim**2)
    # Gemma 2 is stored in float32, of which bfloat16 keeps the range.
    assert model["dtype"] == ("bfloat16" if name == "gemma2" else published["torch_dtype"])
    cli = FitCLI(["--config", f"configs/{name}.yaml", *HERE])
    options = cli.model.dictionary
    if name == "phi3_128k":
        assert options.atoms == 0  # its keys cannot be unrotated
        return
    check_dictionaries(options, shape, tokens=128 * 2048)
    # As many atoms as in the paper, 256 per KV head, unless an index would need another bit.
    assert options.atoms == min(256, LONGEST // shape.kv_heads)
    # As many pairs per channel as 8 of 128 channels, with value chunks of the paper's width or less.
    assert options.keys_sparsity == options.values_sparsity * options.value_chunks == shape.head_dim // 16
    assert shape.head_dim % options.value_chunks == 0 and shape.head_dim // options.value_chunks <= 64


def test_the_documents_table_is_as_the_configurations():
    rows = [line.split("|") for line in Path("docs/models.md").read_text().splitlines() if line.startswith("| `")]
    table = {row[1].strip().strip("`").removesuffix(".yaml"): row for row in rows if ".yaml" in row[1]}
    assert set(table) == set(MODELS)
    for name, row in table.items():
        shape = shape_of(name)
        assert row[2].strip().strip("`") == MODELS[name]["model"]["path"]
        assert row[3].split()[0] == str(shape.layers)
        assert row[4].strip() == f"{shape.kv_heads} x {shape.head_dim}"


def test_the_documented_fits_parse(tmp_path, monkeypatch):
    lines = [
        line.partition("#")[0].split()[2:]
        for line in Path("docs/models.md").read_text().splitlines()
        if "    calib fit" in line
    ]
    (tmp_path / "corpus.txt").write_text("text")
    monkeypatch.chdir(tmp_path)
    assert len(lines) > 3
    for words in lines:
        FitCLI([*words, *HERE])
