"""Bad input of `calib fit`: one line, with status 2 for a wrong request and 1 for one that fails while it runs."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from toy_language_model import save_toy, toy_model, toy_tokenizer

from calib.cli import main

SMALL = [
    "--model.bits=[2]", "--model.clip_factors=[1]", "--model.query_rows=2", "--model.clip_sequences=1", "--data.length=64",
    "--data.sequences=2", "--data.heldout_sequences=1", "--data.batch_size=1", "--trainer.accelerator=cpu",
    "--trainer.enable_progress_bar=false", "--trainer.logger=false", "--model.dictionary.atoms=0",
]  # fmt: skip


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "disabled")
    # A hub address that does not resolve, so that tests do not depend on a network.
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "https://hub.invalid")


def words(toy: Path, *more: str) -> list[str]:
    fixed = [
        f"--model.path={toy / 'llama'}",
        f"--data.text={toy / 'text.txt'}",
        "--output=toy.calib.safetensors",
        *SMALL,
    ]
    return ["fit", *(word for word in fixed if not any(word.split("=")[0] == one.split("=")[0] for one in more)), *more]


def refused(capsys, status: int, arguments: list[str]) -> str:
    """Run `calib` with these arguments; return the one line on stderr. Asserts the status, and that no artifact was written."""
    capsys.readouterr()
    assert main(arguments) == status
    error = capsys.readouterr().err.strip().splitlines()
    assert len(error) == 1, error
    assert error[0].startswith("calib: error: ")
    assert not list(Path.cwd().rglob("*.safetensors"))
    return error[0].removeprefix("calib: error: ")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--model.bit=[2]"], "unknown key 'model.bit' (did you mean 'model.bits'?)"),
        (["--config=nowhere.yaml"], "no configuration file 'nowhere.yaml'"),
        (["--model.bits=[3,2]"], "model.bits=[3, 2]: increasing bit widths from 1 to 8"),
        (["--model.bits=[9]"], "model.bits=[9]: increasing bit widths from 1 to 8"),
        (["--model.bits=[]"], "model.bits=[]: increasing bit widths"),
        (["--model.clip_factors=[0.9]"], "model.clip_factors=[0.9]: decreasing numbers from 1"),
        (["--model.query_rows=0"], "model.query_rows=0: must be at least 1"),
        (["--model.dtype=int4"], "model.dtype='int4': one of float32, bfloat16, float16"),
        (["--model.path=nowhere/at/all"], "model.path 'nowhere/at/all' is no folder, no .gguf file and no hub name"),
        (["--model.path=owner/model"], "without network name a folder that holds the model"),
        (["--data.text=nowhere.txt"], "data.text: no file or folder 'nowhere.txt'"),
        (["--data.length=16"], "data.length=16: must be at least 32"),
        (["--output=artifact.bin"], "output 'artifact.bin' must name a file that ends in .calib.safetensors"),
        (["--ckpt_path=some.ckpt"], "a fit continues with --ckpt_path last"),
        (["--seed_everything=true"], "seed_everything=True: must be a whole number from 0"),
        (["--seed_everything=-1"], "seed_everything=-1: must be a whole number from 0 to 4294967295"),
        (["--trainer.precision=bf16-mixed"], "trainer.precision='bf16-mixed': a fit reads every batch"),
        (["--trainer.limit_train_batches=2"], "trainer.limit_train_batches=2: a fit reads every batch"),
        (["--trainer.fast_dev_run=true"], "trainer.fast_dev_run=True: a fit reads every batch"),
        (["--trainer.strategy=FSDP"], "trainer.strategy=fsdp splits the weights that are trained"),
        (["--trainer.strategy=fsdp_cpu_offload", "--plan"], "trainer.strategy=fsdp_cpu_offload splits the weights"),
        (
            ["--trainer.strategy=deepspeed_stage_3", "--trainer.devices=2"],
            "fits on no device give model.device_map=auto",
        ),
        (
            ["--trainer.strategy={class_path: lightning.pytorch.strategies.FSDPStrategy}"],
            "devices that each hold it trainer.devices=N",
        ),
        (
            ["--trainer.strategy={class_path: ModelParallelStrategy}", "--trainer.devices=2"],
            "trainer.strategy=ModelParallelStrategy splits the weights",
        ),
        (["--trainer.strategy=fsdpp"], "trainer: You selected an invalid strategy name: `strategy='fsdpp'`"),
        (["--trainer.devices=0"], "trainer: `Trainer(devices='0')` value is not a valid input"),
    ],
)
def test_wrong_requests(toy, capsys, more, message):
    assert message in refused(capsys, 2, words(toy, *more))


def test_what_must_be_given(toy, capsys):
    arguments = [word for word in words(toy) if not word.startswith("--model.path")]
    assert "'model.path' must be given (expected str)" in refused(capsys, 2, arguments)


@pytest.mark.full
def test_a_corpus_that_is_empty_short_or_unreadable(toy, capsys, tmp_path):
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "blank.txt").write_text(" \n\n \t\n")
    (tmp_path / "short.txt").write_text("a few words\n")
    (tmp_path / "one.txt").write_text("exactly one sequence of bytes, and no second one to hold out for the errors\n")
    (tmp_path / "binary.txt").write_bytes(b"\x80\x81\x82" * 1000)
    (tmp_path / "folder").mkdir()
    assert "is empty" in refused(capsys, 2, words(toy, "--data.text=empty.txt"))
    assert "is empty" in refused(capsys, 2, words(toy, "--data.text=blank.txt"))
    assert "too short: 12 tokens do not fill one sequence of 64" in refused(
        capsys, 2, words(toy, "--data.text=short.txt")
    )
    assert "it fills 1 sequence of 64 tokens" in refused(capsys, 2, words(toy, "--data.text=one.txt"))
    assert "not UTF-8 text" in refused(capsys, 2, words(toy, "--data.text=binary.txt"))
    assert "the folder 'folder' holds no file" in refused(capsys, 2, words(toy, "--data.text=folder"))


def test_a_hub_name_without_network_says_how_to_use_a_file_and_says_it_at_once(toy, capsys):
    arguments = [word for word in words(toy, "--data.name=Salesforce/wikitext") if not word.startswith("--data.text")]
    begin = time.monotonic()
    line = refused(capsys, 1, arguments)
    assert "Salesforce/wikitext" in line
    assert "text" in line
    assert "without network" in line
    assert time.monotonic() - begin < 30


def test_a_model_that_cannot_be_read(toy, capsys, tmp_path):
    (tmp_path / "nothing").mkdir()
    assert "cannot load the model in 'nothing'" in refused(capsys, 2, words(toy, "--model.path=nothing"))
    save_toy(tmp_path / "cut")
    weights = tmp_path / "cut/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    os.rename(weights, weights.with_suffix(".cut"))
    (tmp_path / "cut/model.safetensors").symlink_to("model.cut")
    capsys.readouterr()
    assert main(words(toy, "--model.path=cut")) == 2
    error = capsys.readouterr().err.strip().splitlines()
    assert len(error) == 1
    assert "cannot load the model in 'cut'" in error[0]


@pytest.mark.parametrize(("projection", "stream"), [("q_proj", "queries"), ("k_proj", "keys"), ("v_proj", "values")])
def test_damaged_weights_name_layer_and_stream(toy, capsys, tmp_path, projection, stream):
    model = toy_model()
    getattr(model.model.layers[2].self_attn, projection).weight[7] = torch.nan
    folder = tmp_path / "damaged"
    model.save_pretrained(folder)
    toy_tokenizer().save_pretrained(folder)
    (folder / "model.safetensors").rename(folder.parent / "model.bin")  # keeps `refused` able to look for output files
    (folder / "model.safetensors").symlink_to("../model.bin")
    capsys.readouterr()
    assert main(words(toy, "--model.path=damaged")) == 1
    error = capsys.readouterr().err.strip().splitlines()
    assert error[0].startswith(f"calib: error: layer 2 {stream}: NaN or infinite activations")
    assert len(error) == 1
    assert not Path("toy.calib.safetensors").exists()


def test_a_tokenizer_of_another_model(toy, capsys, monkeypatch):
    small = toy_model()
    small.resize_token_embeddings(40)
    monkeypatch.setattr("calib.capture.data.load", lambda *_, **__: (small, toy_tokenizer()))
    line = refused(capsys, 1, words(toy))
    assert line.startswith("the tokenizer gives token ") and "the model has only 0 ... 39" in line


def test_an_output_that_cannot_be_written(toy, capsys, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    line = refused(capsys, 2, words(toy, "--output=file/toy.calib.safetensors"))
    assert "cannot be written" in line


@pytest.mark.full
def test_resuming_with_other_settings_or_a_damaged_checkpoint(toy, capsys, tmp_path):
    assert main(words(toy)) == 0
    Path("toy.calib.safetensors").unlink()
    line = refused(capsys, 2, words(toy, "--ckpt_path=last", "--data.length=96"))
    assert "data.length = 64, now it is 96" in line
    checkpoint = tmp_path / "runs/toy/statistics.ckpt"
    checkpoint.write_bytes(checkpoint.read_bytes()[:1000])
    line = refused(capsys, 1, words(toy, "--ckpt_path=last"))
    assert "statistics.ckpt cannot be read" in line
    assert "without --ckpt_path last" in line


@pytest.mark.full
def test_nothing_to_resume_starts_anew_and_says_so(toy, capsys):
    assert main(words(toy, "--ckpt_path=last")) == 0
    assert "no unfinished run in runs/toy; starting anew" in capsys.readouterr().out


@pytest.mark.full
def test_an_interrupted_fit_ends_at_once_without_a_traceback_or_an_artifact(toy, tmp_path):
    code = (
        # Where the tests run in the background of a shell, Python starts with interrupts ignored.
        "import signal, sys, time; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from calib.fit.calibration import Calibration as C\n"
        "from calib import interrupts; interrupts.GRACE = 1\n"  # a batch that does not end
        "C.training_step = lambda *_: (print('running', flush=True), time.sleep(60))\n"
        "from calib.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, *words(toy)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    for line in process.stdout:
        if "running" in line:
            break
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=30)
    assert process.returncode == 130, error
    (line,) = error.splitlines()
    assert line.startswith("calib: interrupted by SIGINT; go on with: calib fit ")
    assert not (tmp_path / "toy.calib.safetensors").exists()
