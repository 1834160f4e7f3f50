"""`calib fit` end to end on toy models: one artifact, the same bytes however often and however interrupted."""

import os
import shlex
import signal
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
import yaml
from toy_language_model import save_toy, toy_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from calib.capture.data import CaptureData
from calib.capture.shape import Shape
from calib.cli import main
from calib.fit.calibration import Calibration
from calib.fit.command import first_look
from calib.fit.stage import STAGES
from calib.runtime import Codec, compress
from calib.runtime.artifact.artifact import Artifact
from calib.runtime.artifact.transform_tensors import KINDS, STORAGE, STREAM_KINDS
from calib.runtime.methods import build
from calib.statistics.channel_range import ChannelRanges

SMALL = [
    "--model.bits=[2,4]", "--model.clip_factors=[1,0.8,0.6]", "--model.query_rows=4", "--model.clip_sequences=4",
    "--data.length=64", "--data.sequences=8", "--data.heldout_sequences=2", "--data.batch_size=2",
    "--model.checkpoint_batches=1", "--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false",
    "--model.dictionary.atoms=0",  # test_fit_dictionaries.py has them
]  # fmt: skip


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "disabled")


def words(toy: Path, *more: str, output: str = "out/toy.calib.safetensors") -> list[str]:
    return [
        "fit",
        f"--model.path={toy / 'llama'}",
        f"--data.text={toy / 'text.txt'}",
        f"--output={output}",
        *SMALL,
        *more,
    ]


@pytest.fixture(scope="module")
def fitted(toy, tmp_path_factory):
    """The artifact's path of an uninterrupted fit, made in a folder of its own."""
    here = Path.cwd()
    os.chdir(tmp_path_factory.mktemp("uninterrupted"))
    try:
        assert main(words(toy, "--trainer.logger=false")) == 0
        return Path("out/toy.calib.safetensors").resolve()
    finally:
        os.chdir(here)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_the_default_dtype_changes_nothing(toy, fitted, dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        assert main(words(toy, "--trainer.logger=false")) == 0
    finally:
        torch.set_default_dtype(before)
    assert Path("out/toy.calib.safetensors").read_bytes() == fitted.read_bytes()


def test_the_artifact_belongs_to_the_model_and_holds_what_the_registry_names(toy, fitted):
    artifact = Artifact.load(fitted)
    artifact.check(AutoModelForCausalLM.from_pretrained(toy / "llama"))
    assert set(artifact.tensors) == {
        "keys.low", "keys.high", "values.low", "values.high", "values.scale", "keys.balancer", "queries.mean_square",
        "keys.clip.32x1", "keys.clip.1x*", "keys.clip.fixed",
        "values.clip.1x32", "values.clip.1x*", "values.clip.fixed", "values.clip.scaled.1x32",
        "outliers.shares",
        *(
            f"{stream}.outliers.{part}.{end}"
            for stream in ("keys", "values") for part in ("channel", "head", "layer") for end in ("low", "high")
        ),
        *(f"keys.residual.{form}.{bits}" for form in ("*x1", "64x1", "*x*", "1x16") for bits in (2, 4)),
        *(f"values.residual.{form}.{bits}" for form in ("1x*", "*x*", "1x16") for bits in (2, 4)),
        "klt.before.loss",
        *(
            f"{stream}.{kind}"
            for stream, kinds in STREAM_KINDS.items() for kind in kinds
        ),
    }  # fmt: skip
    assert artifact.clip_bits == (2, 4)
    assert artifact.clip("keys", "32x1", 4).shape == (3, 2)
    provenance = artifact.provenance
    assert provenance["seed"] == 0
    assert provenance["data"]["name"] == "text.txt"
    assert provenance["data"]["tokens"] == 8 * 64
    assert provenance["config"]["model"] == "llama"
    assert provenance["config"]["residual_bits"] == [2, 4]
    assert provenance["config"]["residual_forms"] == {
        "keys": ["*x1", "64x1", "*x*", "half"],
        "values": ["1x*", "1x64", "*x*", "half"],
    }
    assert str(toy) not in str(provenance)
    layers = provenance["metrics"]["layers"]
    assert [row["layer"] for row in layers] == [0, 1, 2]
    for row in layers:
        assert all(isinstance(number, int | float) for number in row.values())
        assert 0 < row["error_4bit_prompt"] < row["error_2bit_prompt"]
        assert row["keys_low"] == pytest.approx(artifact.tensors["keys.low"][row["layer"]].min().item())
        assert row["keys_outlier"] > 1
    assert (
        provenance["metrics"]["overall"]["error_2bit_clipped"] < provenance["metrics"]["overall"]["error_2bit_prompt"]
    )


@pytest.mark.parametrize(("head_dim", "group"), [(8, 8), (32, None), (80, 16), (128, None), (192, None)])
def test_the_next_command_suits_the_heads(head_dim, group):
    found = shlex.split(first_look("./a model", Path("a model.calib.safetensors"), head_dim))
    assert found[2:6] == ["--model", "./a model", "--artifact", "a model.calib.safetensors"]
    options = {word[2:]: int(value) for word, value in zip(found[8::2], found[9::2], strict=True)}
    assert options == {"bits": 2} | ({"group": group} if group else {})
    assert head_dim % build(found[7], options).group == 0


def test_the_ranges_are_those_of_a_plain_forward_pass(toy, fitted):
    """No part of the pipeline is used but the corpus: keys and values come from transformers' own cache."""
    data = CaptureData(
        str(toy / "llama"), text=str(toy / "text.txt"), length=64, sequences=8, heldout_sequences=2, batch_size=2
    )
    _, _, corpus = data.load()
    cache = toy_model()(corpus.train, use_cache=True).past_key_values
    artifact = Artifact.load(fitted)
    for layer, stored in enumerate(cache.layers):
        for stream, x in (("keys", stored.keys), ("values", stored.values)):
            torch.testing.assert_close(artifact.tensors[f"{stream}.low"][layer], x.amin((0, 2)), rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(artifact.tensors[f"{stream}.high"][layer], x.amax((0, 2)), rtol=1e-4, atol=1e-4)


@pytest.mark.full
def test_the_same_seed_gives_the_same_bytes_and_prints_a_table(toy, fitted, tmp_path, capsys):
    assert main(words(toy, output="elsewhere/other name.safetensors")) == 0
    assert (tmp_path / "elsewhere/other name.safetensors").read_bytes() == fitted.read_bytes()
    out = capsys.readouterr().out
    rows = [line.split() for line in out.splitlines() if line.strip()[:2] in ("0 ", "1 ", "2 ")]
    assert [row[0] for row in rows] == ["0", "1", "2"]
    assert all(len(row) == 15 for row in rows)  # layer, 2 x (low, high, outlier, tail), 2 x 3 errors
    shown = Artifact.load(fitted).provenance["metrics"]["layers"][1]
    assert rows[1][9:] == [
        f"{shown[f'error_{bits}bit_{name}']:.3f}" for bits in (4, 2) for name in ("prompt", "clipped", "calibrated")
    ]
    assert "wrote elsewhere/other name.safetensors" in out
    (following,) = (shlex.split(line)[2:] for line in out.splitlines() if line.startswith("next: calib "))
    assert main([*following, "--prompt", "line", "--max-new-tokens", "1"]) == 0
    config = yaml.safe_load((tmp_path / "runs/other name/config.yaml").read_text())
    assert config["data"]["length"] == 64
    tables = list((tmp_path / "runs/other name").rglob("fit-layers.csv"))
    assert len(tables) == 1
    assert len(tables[0].read_text().splitlines()) == 4


@pytest.mark.full
def test_another_seed_gives_other_bytes(toy, fitted, tmp_path):
    assert main(words(toy, "--seed_everything=1", "--trainer.logger=false")) == 0
    own, other = (Artifact.load(path).tensors for path in (fitted, tmp_path / "out/toy.calib.safetensors"))
    assert own.keys() == other.keys()
    equal = {name for name, x in own.items() if torch.equal(x, other[name])}
    # Clip factors are chosen from three, and may be the same.
    assert {name for name in equal if ".clip." not in name} == {"outliers.shares"}


@pytest.mark.full
def test_residual_bases_are_those_that_are_asked_for(toy, fitted, tmp_path):
    (tmp_path / "forms.yaml").write_text(
        'model: {residual_bits: [3], residual_forms: {keys: ["*x1", 1x32], values: []}}'
    )
    assert main(words(toy, "--config=forms.yaml", "--trainer.logger=false")) == 0
    some, whole = Artifact.load(tmp_path / "out/toy.calib.safetensors"), Artifact.load(fitted)
    assert {name for name in some.tensors if ".residual." in name} == {"keys.residual.*x1.3", "keys.residual.1x*.3"}
    assert some.provenance["config"]["residual_forms"] == {"keys": ["*x1", "1x32"], "values": []}
    assert all(torch.equal(some.tensors[name], x) for name, x in whole.tensors.items() if ".residual." not in name)
    saved = yaml.safe_load((tmp_path / "runs/toy/config.yaml").read_text())["model"]
    assert (saved["residual_bits"], saved["residual_forms"]) == ([3], {"keys": ["*x1", "1x32"], "values": []})

    assert main(words(toy, "--model.residual_forms={keys: [], values: []}", "--trainer.logger=false")) == 0
    none = Artifact.load(tmp_path / "out/toy.calib.safetensors")
    assert none.tensors.keys() == {name for name in whole.tensors if ".residual." not in name}


class PowerCut(RuntimeError):
    pass


@pytest.mark.full
@pytest.mark.parametrize("batches", [3, 6, 8, 10], ids=lambda n: f"after-{n}-batches")
def test_a_fit_that_fails_anywhere_goes_on_from_there(toy, fitted, tmp_path, monkeypatch, batches):
    """4 batches of statistics and of sensitivities, 2 of clip factors, 1 of evaluation; each is run once over both attempts."""
    step, run = Calibration.training_step, []

    def counted(self, batch, batch_idx):
        if len(run) == batches and "cut" not in run:
            run.append("cut")
            raise PowerCut("the lights went out")
        step(self, batch, batch_idx)
        run.append(self.stage.name)

    monkeypatch.setattr(Calibration, "training_step", counted)
    assert main(words(toy, "--trainer.logger=false")) == 1
    assert not (tmp_path / "out").exists()
    assert main(words(toy, "--trainer.logger=false", "--ckpt_path=last")) == 0
    # Saved with ckpt_path, this file would make another fit resume this run.
    assert yaml.safe_load((tmp_path / "runs/toy/config.yaml").read_text()).get("ckpt_path") is None
    assert [name for name in run if name != "cut"] == ["statistics"] * 4 + ["sensitivity"] * 4 + ["clip"] * 2 + [
        "evaluate"
    ]
    assert (tmp_path / "out/toy.calib.safetensors").read_bytes() == fitted.read_bytes()


@pytest.mark.full
def test_a_fit_that_is_killed_leaves_the_old_artifact_and_resumes_to_the_same_bytes(toy, fitted, tmp_path):
    output = tmp_path / "out/toy.calib.safetensors"
    output.parent.mkdir()
    output.write_bytes(b"the old one")
    # The process sleeps after each batch of a stage, so that it is killed within the stage. More clip factors would be slow as
    # well, but give another artifact.
    code = (
        "import sys, time; from calib.fit.calibration import Calibration as C; step = C.training_step\n"
        "def slow(self, batch, i): step(self, batch, i); time.sleep(0.4 if self.stage.name == 'clip' else 0)\n"
        "C.training_step = slow; from calib.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, *words(toy, "--trainer.logger=false")], stderr=subprocess.PIPE
    )
    checkpoint = tmp_path / "runs/toy/clip.ckpt"
    deadline = time.monotonic() + 120
    while not checkpoint.exists():
        assert process.poll() is None, process.stderr.read().decode()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    process.stderr.close()
    assert output.read_bytes() == b"the old one"
    assert main(words(toy, "--trainer.logger=false", "--ckpt_path=last")) == 0
    assert output.read_bytes() == fitted.read_bytes()


@pytest.mark.full
def test_a_finished_run_is_not_run_again(toy, fitted, tmp_path, monkeypatch):
    assert main(words(toy, "--trainer.logger=false")) == 0
    monkeypatch.setattr(Calibration, "training_step", lambda *_: pytest.fail("a finished stage ran again"))
    Path("out/toy.calib.safetensors").unlink()
    assert main(words(toy, "--trainer.logger=false", "--ckpt_path=last")) == 0
    assert (tmp_path / "out/toy.calib.safetensors").read_bytes() == fitted.read_bytes()


@pytest.mark.full
def test_a_full_disk_in_the_middle_of_a_checkpoint_is_told_and_leaves_nothing(toy, tmp_path):
    """torch's own message is "unexpected pos 64 vs 0"."""
    code = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))\n"
        "from calib.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    asked = [sys.executable, "-c", code, *words(toy, "--trainer.logger=false")]
    done = subprocess.run(asked, capture_output=True, text=True)
    told = done.stderr.splitlines()[-1]
    assert done.returncode == 1 and "the checkpoint" in told and "cannot be written (File too large); make room" in told
    assert [path.name for path in (tmp_path / "runs/toy").iterdir()] == ["config.yaml"]


def test_a_callback_that_ends_a_stage_early_ends_the_fit(toy, tmp_path, capsys):
    """It must not write an artifact of no batches, with errors of 0, or checkpoints of stages as if they had finished."""
    timer = "--trainer.callbacks=Timer"
    assert main(words(toy, "--trainer.logger=false", timer, "--trainer.callbacks.duration=00:00:00:00")) == 2
    err = capsys.readouterr().err
    assert "calib: error: trainer.callbacks: one of them ended a stage early" in err and err.count("\n") == 1
    assert not (tmp_path / "out").exists() and not list((tmp_path / "runs").rglob("*.ckpt"))
    (callback,) = yaml.safe_load((tmp_path / "runs/toy/config.yaml").read_text())["trainer"]["callbacks"]
    assert callback["init_args"]["interval"] == "step"  # formerly not writable as YAML, which ended the fit


@pytest.mark.full
def test_a_run_does_not_go_on_under_other_software(toy, tmp_path, monkeypatch, capsys):
    """The artifact records the versions that measured it, which would be wrong for the other part of it."""
    with monkeypatch.context() as cut:
        cut.setattr("calib.fit.command.fit_dictionaries", lambda *_: (_ for _ in ()).throw(RuntimeError("cut")))
        assert main(words(toy, "--trainer.logger=false")) == 1
    other = {"torch": "0.1"}
    monkeypatch.setattr("calib.fit.provenance.version", lambda name: other.get(name) or version(name))
    capsys.readouterr()
    assert main(words(toy, "--trainer.logger=false", "--ckpt_path=last")) == 2
    assert f"had version of torch = {version('torch')}, now it is 0.1: give it" in capsys.readouterr().err


@pytest.mark.full
def test_checkpoints_hold_no_language_model(toy, tmp_path):
    assert main(words(toy, "--trainer.logger=false")) == 0
    for stage in STAGES:
        checkpoint = torch.load(tmp_path / f"runs/toy/{stage.name}.ckpt", weights_only=True)
        assert all(name.startswith("statistics.") for name in checkpoint["state_dict"])


@pytest.mark.full
def test_rotations_are_measured_where_they_are_asked_for(toy, fitted, tmp_path):
    """A fit with rotations adds their tensors and has the same ranges; `oscar`, which reads them, runs with the artifact."""
    assert main(words(toy, "--model.rotations=true", "--model.klt=false", "--trainer.logger=false")) == 0
    without, artifact = Artifact.load(fitted), Artifact.load(tmp_path / "out/toy.calib.safetensors")
    assert artifact.tensors.keys() - without.tensors.keys() == {"keys.rotation", "values.rotation"}
    assert torch.equal(artifact.tensor("keys.low"), without.tensor("keys.low"))
    assert artifact.provenance["config"]["rotations"] is True and "rotations" not in without.provenance["config"]
    model = AutoModelForCausalLM.from_pretrained(toy / "llama")
    with compress(model, "oscar", artifact=artifact, sinks=4, window=8) as cache, torch.no_grad():
        model(torch.arange(60)[None], past_key_values=cache)
        assert cache.memory().measured_bytes == cache.memory().predicted_bytes


@pytest.mark.full
def test_codes_are_fitted_where_they_are_asked_for(toy, fitted, tmp_path):
    """A fit with storage codes adds their tensors alone; at 2 bits their squared errors are below half those of `heads`."""
    assert main(words(toy, "--model.storage=true", "--trainer.logger=false")) == 0
    without, artifact = Artifact.load(fitted), Artifact.load(tmp_path / "out/toy.calib.safetensors")
    ours = {f"{stream}.{kind}" for stream in STORAGE for kind in (*KINDS, "matrix")}
    assert artifact.tensors.keys() - without.tensors.keys() == ours
    assert all(torch.equal(artifact.tensor(name), tensor) for name, tensor in without.tensors.items())
    assert artifact.provenance["config"]["storage"] is True and "storage" not in without.provenance["config"]
    model = AutoModelForCausalLM.from_pretrained(toy / "llama")
    text = (toy / "text.txt").read_text()
    ids = AutoTokenizer.from_pretrained(toy / "llama")(text, return_tensors="pt").input_ids[:, -200:]
    with torch.no_grad():
        layers = model(ids, use_cache=True).past_key_values.layers
    both = [torch.stack([getattr(layer, name)[0] for layer in layers]) for name in ("keys", "values")]
    chunk = torch.stack(both).transpose(2, 3).flatten(3)
    errors = {}
    for profile in ("storage", "heads"):
        codec = Codec.from_artifact(artifact, bits=2, profile=profile)
        assert codec.bits <= 2
        errors[profile] = (codec.decode(codec.encode(chunk, 0)) - chunk).square().mean((1, 2, 3))
    assert bool((errors["storage"] < 0.5 * errors["heads"]).all())


def test_a_fit_without_klt_is_refused(toy, capsys):
    assert main(words(toy, "--model.storage=true", "--model.klt=false")) == 2
    assert "its bases weigh errors as those of klt; leave klt on" in capsys.readouterr().err


@pytest.mark.full
@pytest.mark.parametrize("kind", ["mistral", "qwen3", "gemma2"])
def test_other_architectures_and_generated_text(kind, tmp_path):
    save_toy(tmp_path / kind, kind)
    options = [word for word in SMALL if not word.startswith("--data.sequences")]
    arguments = ["fit", f"--model.path={kind}", "--data.sequences=4", f"--output={kind}.safetensors", *options]
    assert main([*arguments, "--trainer.logger=false"]) == 0
    artifact = Artifact.load(f"{kind}.safetensors")
    artifact.check(AutoModelForCausalLM.from_pretrained(tmp_path / kind))
    assert artifact.provenance["data"]["name"] == "generated"


@pytest.mark.full
def test_llama2_config_typed_in_any_folder_works_with_a_local_model_and_text(toy, tmp_path):
    arguments = [
        "fit",
        "--config",
        "llama2.yaml",
        "--model.path",
        str(toy / "llama"),
        "--data.text",
        str(toy / "text.txt"),
    ]
    less = [
        "--data.sequences=3",
        "--data.heldout_sequences=1",
        "--model.clip_sequences=1",
        "--model.dtype=float32",
        "--model.query_rows=2",
        "--model.dictionary.atoms=16",
    ]
    assert main([*arguments, *less, "--trainer.logger=false", "--trainer.accelerator=cpu"]) == 0
    artifact = Artifact.load(tmp_path / "artifacts/llama2-7b.calib.safetensors")
    assert artifact.provenance["data"]["length"] == 256
    assert artifact.clip_bits == (1, 2, 3, 4)


@pytest.mark.full
def test_ddp_of_one_process_is_a_fit_like_any_other(toy, fitted, tmp_path):
    assert main(words(toy, "--trainer.strategy=ddp", "--trainer.logger=false")) == 0
    assert (tmp_path / "out/toy.calib.safetensors").read_bytes() == fitted.read_bytes()


@pytest.mark.slow
def test_two_processes_measure_what_one_does(toy, fitted, tmp_path):
    """Batches are shared out, statistics merged at the end of a stage: minima, maxima and samples exactly."""
    script = tmp_path / "run.py"  # Lightning starts the second process by running this file again
    script.write_text("import sys; from calib.cli import main; sys.exit(main(sys.argv[1:]))")
    command = [sys.executable, str(script)]
    more = ["--trainer.devices=2", "--trainer.strategy=ddp", "--trainer.logger=false"]
    result = subprocess.run([*command, *words(toy, *more)], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-2000:]
    one, two = Artifact.load(fitted), Artifact.load(tmp_path / "out/toy.calib.safetensors")
    for name, tensor in one.tensors.items():
        if name == "queries.mean_square" or ".residual." in name or ".klt" in name:  # sums in another order, in float64
            torch.testing.assert_close(two.tensors[name], tensor, rtol=1e-6, atol=0 if "queries" in name else 1e-6)
        else:
            assert torch.equal(two.tensors[name], tensor), name
    assert two.provenance["metrics"]["layers"][1]["keys_tail"] == one.provenance["metrics"]["layers"][1]["keys_tail"]


def test_statistics_of_the_embedded_shape_fit_in_little_memory():
    """The float32 ranges for the shape of Llama 2 7B: 2 MiB."""
    ranges = ChannelRanges(Shape(layers=32, heads=32, kv_heads=32, head_dim=128))
    assert sum(buffer.nbytes for buffer in ranges.buffers()) == 4 * 32 * 32 * 128 * 4
