"""Logging: an offline W&B run is read back, CSV files are written without W&B, and no logger can end a run."""

import json
import warnings
from pathlib import Path

import pytest
import torch
import wandb
from calib_wandb_file import only_run
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.utils.data import DataLoader
from toy_language_model import save_text, save_toy

from calib.cli import main
from calib.loggers import OfflineFirstWandbLogger, TableCSVLogger, run_logger
from calib.runtime.artifact.artifact import Artifact


@pytest.fixture(autouse=True)
def offline(tmp_path, monkeypatch):
    """No key, and everything W&B writes lands in the test's folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
    monkeypatch.setenv("WANDB_MODE", "online")
    for name in ("WANDB_DATA_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "wandb-home"))


@pytest.mark.full
def test_a_fit_leaves_metrics_table_and_artifact_in_an_offline_run(tmp_path):
    save_toy(tmp_path / "llama")
    save_text(tmp_path / "text.txt")
    assert main([
        "fit", "--model.path=llama", "--data.text=text.txt", "--output=toy.calib.safetensors", "--model.bits=[2,4]",
        "--model.clip_factors=[1,0.8]", "--model.query_rows=4", "--model.clip_sequences=2", "--data.length=64",
        "--data.sequences=4", "--data.heldout_sequences=2", "--data.batch_size=2", "--trainer.accelerator=cpu",
        "--trainer.enable_progress_bar=false",
    ]) == 0  # fmt: skip
    assert wandb.run is None
    folder = tmp_path / "runs/toy"
    found = only_run(folder)
    logged = [
        {".".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
        for record in found
        if record.HasField("history")
    ]
    artifact = Artifact.load("toy.calib.safetensors")
    overall = artifact.provenance["metrics"]["overall"]
    last = {name: value for row in logged for name, value in row.items()}
    for name, value in overall.items():
        assert last[f"fit/{name}"] == pytest.approx(value)
    assert [row["statistics/sequences"] for row in logged if "statistics/sequences" in row] == [2, 4]
    assert any("evaluate/error_2bit_clipped" in row for row in logged)
    for stream in ("keys", "values"):  # a curve for each group: the centroids, and every epoch
        for group in artifact.tensors[f"{stream}.layer_groups"].unique().tolist():
            name = f"dictionaries/{stream}.{group}"
            curve = [row[f"{name}/validation"] for row in logged if f"{name}/validation" in row]
            epochs = sum(f"{name}/loss" in row and f"{name}/beta" in row for row in logged)
            assert len(curve) == epochs + 1 > 1
    assert last["fit/layers._type"] == "table-file"
    (table,) = (folder / "wandb").glob(f"offline-run-*/files/{last['fit/layers.path']}")
    content = json.loads(table.read_text())
    layers = artifact.provenance["metrics"]["layers"]
    assert set(content["columns"]) == set(layers[0])
    rows = [dict(zip(content["columns"], row, strict=True)) for row in content["data"]]
    assert rows == [pytest.approx(row) for row in layers]
    logged_artifacts = [
        record.request.log_artifact.artifact for record in found if record.request.HasField("log_artifact")
    ]
    logged_artifacts += [record.artifact for record in found if record.HasField("artifact")]
    (calibration,) = [one for one in logged_artifacts if one.type == "calibration"]
    (entry,) = calibration.manifest.contents
    assert entry.path == "toy.calib.safetensors"
    assert Path(entry.local_path).read_bytes() == Path("toy.calib.safetensors").read_bytes()


@pytest.mark.full
def test_nothing_of_the_machine_is_logged(tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "hunter2-hunter2")
    logger = run_logger(tmp_path / "run", "name")
    logger.log_hyperparams({"bits": 2})
    logger.log_metrics({"x": 1.0}, 0)
    logger.close()
    (file,) = (tmp_path / "run").rglob("*.wandb")
    content = file.read_bytes()
    assert b"bits" in content and b"hunter2" not in content
    names = {path.name for path in (tmp_path / "run").rglob("*")}
    assert not names & {"requirements.txt", "wandb-metadata.json", "output.log", "conda-environment.yaml"}


def test_without_a_login_the_run_is_offline_and_asks_nothing(tmp_path):
    logger = run_logger(tmp_path, "name")
    assert isinstance(logger, OfflineFirstWandbLogger)
    assert logger._wandb_init["settings"].mode == "offline"


def test_csv_takes_its_position(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    logger = run_logger(tmp_path, "name")
    assert isinstance(logger, TableCSVLogger)
    logger.log_metrics({"x": 1.5}, 3)
    logger.log_table("fit/layers", ["layer", "error"], [[0, 0.5], [1, 0.25]])
    (tmp_path / "file.txt").write_text("content")
    logger.log_file(tmp_path / "file.txt", "calibration")
    logger.close()
    folder = Path(logger.log_dir)
    assert (folder / "metrics.csv").read_text().splitlines()[1].split(",") == ["3", "1.5"]
    assert (folder / "fit-layers.csv").read_text().splitlines() == ["layer,error", "0,0.5", "1,0.25"]
    (copy,) = folder.glob("calibration-*-file.txt")
    assert copy.read_text() == "content"


def test_csv_without_wandb(tmp_path, monkeypatch):
    monkeypatch.setattr("calib.loggers.find_spec", lambda name: None)
    assert isinstance(run_logger(tmp_path, "name"), TableCSVLogger)


def test_a_logger_that_breaks_warns_once_and_is_silent(tmp_path, monkeypatch):
    logger = run_logger(tmp_path / "run", "name")

    def broken(*_, **__):
        raise OSError("disk full")

    monkeypatch.setattr("wandb.init", broken)
    with pytest.warns(UserWarning, match="W&B stopped logging: disk full"):
        logger.log_metrics({"x": 1.0}, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        logger.log_metrics({"x": 1.0}, 1)
        logger.log_table("t", ["a"], [[1]])
        logger.log_file(tmp_path / "nowhere", "calibration")
        logger.log_hyperparams({"a": 1})
        logger.close()


@pytest.mark.parametrize("full", ["open", "os.makedirs", "shutil.copyfile"])
def test_csv_files_on_a_full_disk_end_no_run(tmp_path, monkeypatch, full):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    (tmp_path / "file.txt").write_text("content")
    logger = run_logger(tmp_path / "run", "name")

    def broken(*_, **__):
        raise OSError(28, "no room")

    if full == "open":
        monkeypatch.setattr(logger._fs, "open", broken)
    else:
        monkeypatch.setattr(full, broken)
    trainer = Trainer(
        logger=logger, max_steps=1, enable_checkpointing=False, enable_model_summary=False, accelerator="cpu"
    )
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        logger.log_hyperparams({"a": 1})
        trainer.fit(BoringModel(), DataLoader(torch.zeros(4, 32)))
        logger.log_metrics({"x": 1.0})
        logger.log_table("t", ["a"], [[1]])
        logger.log_file(tmp_path / "file.txt", "calibration")
        logger.close()
    (line,) = [str(one.message) for one in told if "stopped" in str(one.message)]
    assert line.startswith("CSV stopped logging: [Errno 28] no room")
    assert not list((tmp_path / "run").rglob("*file.txt*"))


def test_a_run_that_does_not_begin_ends_no_trainer(tmp_path, monkeypatch):
    """With a key but no network: the Trainer also opens the W&B run itself, outside the logger's methods that catch errors."""

    def unreachable(**_):
        raise OSError("no such host")

    monkeypatch.setattr("wandb.init", unreachable)
    logger = run_logger(tmp_path / "run", "name")
    trainer = Trainer(
        logger=logger, max_steps=1, enable_checkpointing=False, enable_model_summary=False, accelerator="cpu"
    )
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        logger.log_hyperparams({"a": 1})
        trainer.fit(BoringModel(), train_dataloaders=DataLoader([torch.ones(32)]))
        logger.log_table("t", ["a"], [[1]])
        logger.close()
    assert [str(one.message) for one in told if "W&B" in str(one.message)] == ["W&B stopped logging: no such host"]
    assert trainer.global_step == 1


def test_wandb_that_does_not_start_is_replaced(tmp_path, monkeypatch):
    monkeypatch.setattr("calib.loggers.logged_in", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    with pytest.warns(UserWarning, match="W&B did not start"):
        assert isinstance(run_logger(tmp_path, "name"), TableCSVLogger)


def test_an_evaluation_leaves_a_table_a_column_and_its_files(tmp_path):
    save_toy(tmp_path / "llama")
    methods = [{"name": "all", "method": "full"}, {"name": "theirs", "peer": "dynamic"}]
    tasks = [
        {"task": "retrieval", "lines": [2], "cases": 2},
        {"task": "perplexity", "prefill": 8, "length": 16, "tokens": 8},
    ]
    Path("e.yaml").write_text(json.dumps({"model": "llama", "methods": methods, "tasks": tasks}))
    for _ in range(2):  # the second measures nothing, and logs nothing
        assert main(["eval", "--config", "e.yaml", "--output", "out"]) == 0
    found = only_run(tmp_path / "out" / "logs")
    logged = [item for record in found if record.HasField("history") for item in record.history.item]
    paths = {item.nested_key[0]: json.loads(item.value_json) for item in logged if item.nested_key[1:] == ["path"]}
    assert set(paths) == {"eval/2 lines", "eval/perplexity"}
    document = json.loads(Path("out/results.json").read_text())
    for title, measured in (("2 lines", "exact"), ("perplexity", "perplexity")):
        (file,) = (tmp_path / "out" / "logs").glob(f"wandb/offline-run-*/files/{paths[f'eval/{title}']}")
        table = json.loads(file.read_text())
        rows = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
        cells = [cell for cell in document["cells"] if cell["column"] == title]
        assert [row["name"] for row in rows] == ["all", "theirs"]
        for row, cell in zip(rows, cells, strict=True):
            assert row[measured] == pytest.approx(cell["figures"][measured])
            assert row["measured_bytes"] == cell["sizes"]["measured_bytes"]
    logged_artifacts = [r.request.log_artifact.artifact for r in found if r.request.HasField("log_artifact")]
    logged_artifacts += [record.artifact for record in found if record.HasField("artifact")]
    files = {entry.path for one in logged_artifacts for entry in one.manifest.contents}
    assert {"results.json", "report.md", "report.html"} <= files
