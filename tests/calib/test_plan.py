"""`calib fit --plan` against the fit that it plans, on toy models: bytes of files and caches; and a plan leaves no files."""

import json
import os
from pathlib import Path

import pytest
import torch
from tolerances import MEMORY
from toy_language_model import save_toy
from transformers import AutoModelForCausalLM

from calib import cli, lightning_cli
from calib.capture import language_model
from calib.errors import UsageError
from calib.plan.artifact_size import file_bytes
from calib.plan.cache_sizes import cache_size
from calib.plan.meta_model import read_meta_model
from calib.runtime import Artifact, compress
from calib.runtime.methods import METHODS

BATCH, CONTEXT = 3, 400
SMALL = [
    "--model.bits=[2,4]", "--model.clip_factors=[1,0.8,0.6]", "--model.query_rows=4", "--model.clip_sequences=4",
    "--data.length=64", "--data.sequences=8", "--data.heldout_sequences=2", "--data.batch_size=2",
    "--model.dictionary.atoms=16", "--model.dictionary.samples=256", "--model.dictionary.heldout_samples=64",
    "--model.dictionary.epochs=1", "--model.dictionary.groups=layers", "--model.rotations=true",
    "--model.nuq=[0.01]",
    "--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false",
]  # fmt: skip


def words(model: Path, text: Path, *more: str) -> list[str]:
    return [
        "fit",
        f"--model.path={model}",
        f"--data.text={text}",
        "--output=out/toy.calib.safetensors",
        *SMALL,
        *more,
    ]


@pytest.fixture(scope="module")
def planned(toy, tmp_path_factory):
    """The plan, and a folder with the fit's files: `out/`, `runs/toy/`."""
    here, folder = Path.cwd(), tmp_path_factory.mktemp("planned")
    os.chdir(folder)
    try:
        asked = words(toy / "llama", toy / "text.txt", "--trainer.logger=false")
        options = ("--plan", "--plan_json=plan.json", f"--plan_batch={BATCH}", f"--plan_context={CONTEXT}")
        assert cli.main([*asked, *options]) == 0
        assert cli.main(asked) == 0
    finally:
        os.chdir(here)
    return json.loads((folder / "plan.json").read_text()), folder


@pytest.fixture(scope="module")
def artifact(planned):
    return Artifact.load(planned[1] / "out/toy.calib.safetensors")


@pytest.mark.full
def test_the_artifact_has_the_tensors_and_the_bytes_that_were_planned(planned, artifact):
    plan, folder = planned
    assert plan["artifact"]["tensors"] == {name: list(tensor.shape) for name, tensor in artifact.tensors.items()}
    size = (folder / "out/toy.calib.safetensors").stat().st_size
    assert plan["artifact"]["bytes"] == pytest.approx(size, rel=0.003)
    assert file_bytes(artifact) == size  # exact with all figures of the fit


@pytest.mark.full
def test_checkpoints_have_the_bytes_of_the_statistics_that_were_planned(planned):
    plan, folder = planned
    for one in plan["passes"]:
        saved = torch.load(folder / f"runs/toy/{one['stage']}.ckpt", weights_only=True)
        stored = saved["state_dict"]
        assert plan["statistics"]["bytes"] == sum(tensor.nbytes for tensor in stored.values())
        assert saved["calibration"]["seen"] == one["batches"]
        for name, statistic in plan["statistics"]["each"].items():
            own = [tensor.nbytes for key, tensor in stored.items() if key.startswith(f"statistics.{name}.")]
            assert statistic["bytes"] == sum(own), name
    dictionaries = torch.load(folder / "runs/toy/dictionaries.ckpt", weights_only=True)["state_dict"]
    atoms = [tensor.nbytes for name, tensor in dictionaries.items() if tensor.ndim == 2]
    assert plan["disk"]["dictionaries_checkpoint"] == sum(atoms)
    files = sum(file.stat().st_size for file in (*(folder / "runs").rglob("*.ckpt"), *(folder / "out").iterdir()))
    told = plan["disk"]["total"] - plan["disk"]["written_beside"] - plan["disk"]["copy_of_the_logger"]
    assert told == pytest.approx(files, rel=0.1)  # what a file has besides its tensors


@pytest.mark.full
def test_dictionaries_and_passes_are_those_of_the_fit(planned, artifact):
    plan, _ = planned
    for stream, one in plan["dictionaries"]["streams"].items():
        assert [one[name] for name in ("groups", "atoms", "channels")] == list(
            artifact.tensors[f"{stream}.dictionary"].shape
        )
        trained = [row for row in artifact.provenance["metrics"]["dictionaries"] if row["stream"] == stream]
        assert one["vectors"] == sum(row["samples"] for row in trained)
    assert [(one["stage"], one["sequences"]) for one in plan["passes"]] == [
        ("statistics", 8),
        ("sensitivity", 8),
        ("clip", 4),
        ("evaluate", 2),
    ]
    assert plan["corpus"]["tokens"] == 10 * 64


@pytest.mark.full
@pytest.mark.parametrize("method", METHODS)
def test_a_cache_weighs_what_was_planned(method, planned, artifact, toy):
    assert (planned[0]["cache"]["batch"], planned[0]["cache"]["context"]) == (BATCH, CONTEXT)
    told = planned[0]["cache"]["methods"][method]
    model = AutoModelForCausalLM.from_pretrained(toy / "llama")
    found = measured(model, method, artifact, BATCH, CONTEXT)
    # klt's bit widths depend on the data, and its tables are the larger part of so small a cache.
    rel = 0.05 if method == "klt" else 0
    assert told["device_bytes"] == pytest.approx(found.measured_bytes, rel=rel, abs=0)
    assert told["host_bytes"] == found.host_bytes
    if method != "offload":
        assert told["bits_per_value"] == pytest.approx(found.bits_per_value, rel=rel, abs=0)


@pytest.mark.parametrize(("kind", "slide"), [("gemma2", 2), ("mistral", 0)])  # beside others, which are compressed
@pytest.mark.parametrize("method", ["kivi", "h2o"])
def test_sliding_layers_are_weighed_as_the_cache_keeps_them(kind, slide, method, tmp_path):
    save_toy(tmp_path, kind)
    meta_model = read_meta_model(str(tmp_path), "float32")
    found = measured(AutoModelForCausalLM.from_pretrained(tmp_path), method, None, 2, 150)
    assert found.compressed_layers == len(meta_model.compressed) == meta_model.shape.layers - slide
    assert cache_size(meta_model, method, {}, None, 2, 150).device == pytest.approx(found.measured_bytes, rel=MEMORY)


def measured(model, method, artifact, batch, context):
    with compress(model, method, artifact=artifact) as cache, torch.no_grad():
        model(torch.randint(3, 259, (batch, context)), past_key_values=cache)
        return cache.memory()


@pytest.mark.full
def test_nothing_is_loaded_read_logged_or_written(toy, tmp_path, monkeypatch, capsys):
    text, model = tmp_path / "text.txt", tmp_path / "model"
    text.write_bytes(b"\xff no text")  # found, never read
    model.mkdir()
    (model / "config.json").write_bytes((toy / "llama/config.json").read_bytes())  # no weights, no tokenizer
    empty = tmp_path / "here"
    empty.mkdir()
    monkeypatch.chdir(empty)
    for owner, name in ((lightning_cli, "run_logger"), (language_model.AutoTokenizer, "from_pretrained")):
        monkeypatch.setattr(owner, name, lambda *given, **more: pytest.fail("a plan needs none"))
    callback = "--trainer.callbacks=[lightning.pytorch.callbacks.ModelCheckpoint]"
    assert cli.main(words(model, text, "--plan", callback, "--model.dictionary.atoms=0")) == 0
    told = capsys.readouterr()
    assert "No dictionaries." in told.out
    assert "csr: tensor" in told.out or "csr: method 'csr' needs tensor" in told.out
    assert list(empty.iterdir()) == []


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--plan_batch=0"], "plan_batch=0: must be at least 1"),
        (["--plan_context=-1"], "plan_context=-1: must be at least 1"),
        (["--model.path=nowhere/at/all"], "model.path 'nowhere/at/all' is no folder, no .gguf file and no hub name"),
        (["--model.path=EMPTY"], "cannot build the model in '"),
        (["--model.dictionary.atoms=5000"], "model.dictionary.atoms=5000"),
        (["--model.dictionary.groups=paper-32"], "is for models of 32 layers, this one has 3"),
    ],
)
def test_what_cannot_be_planned_is_told_in_one_line(more, said, toy, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    more = [word.replace("EMPTY", str(tmp_path)) for word in more]
    assert cli.main(words(toy / "llama", toy / "text.txt", "--plan", *more)) == 2
    told = capsys.readouterr().err
    assert said in told and told.count("\n") == 1


def test_a_file_for_the_plan_is_refused_without_one(toy, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(words(toy / "llama", toy / "text.txt", "--plan_json=plan.json")) == 2
    assert "there is no plan to write; add --plan" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_hub_that_cannot_be_reached_is_told_in_one_line(monkeypatch):
    monkeypatch.setattr(language_model, "hub_answers", lambda: False)
    with pytest.raises(
        UsageError, match=r"no folder 'owner/none' here.*without network name a folder that holds the model"
    ) as told:
        read_meta_model("owner/none", "float16")
    assert "\n" not in str(told.value)


def test_auto_is_the_dtype_that_the_configuration_names(toy, tmp_path):
    config = json.loads((toy / "llama/config.json").read_text()) | {"dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_meta_model(str(tmp_path), "auto").model.dtype == torch.bfloat16
    assert read_meta_model(str(toy / "llama"), "auto").model.dtype == torch.float32
