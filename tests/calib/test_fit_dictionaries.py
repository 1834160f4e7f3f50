"""The dictionaries of `calib fit`: the groups, what they are trained on, the same bytes however often interrupted."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from toy_language_model import save_toy, toy_model

from calib.capture.data import CaptureData
from calib.cli import main
from calib.fit.calibration import Calibration
from calib.kernels.matching_pursuit.reference import desparsify, matching_pursuit
from calib.neural_dict.module import NeuralDictionaries
from calib.runtime import compress
from calib.runtime.artifact.artifact import Artifact

SMALL = [
    "--model.bits=[2]", "--model.clip_factors=[1]", "--model.query_rows=2", "--model.clip_sequences=1",
    "--model.residual_forms={keys: [], values: []}", "--data.length=64", "--data.sequences=8",
    "--data.heldout_sequences=2", "--data.batch_size=2", "--model.checkpoint_batches=1", "--trainer.accelerator=cpu",
    "--trainer.enable_progress_bar=false", "--trainer.logger=false",
    "--model.dictionary.atoms=12", "--model.dictionary.samples=900", "--model.dictionary.heldout_samples=400",
    "--model.dictionary.keys_sparsity=3", "--model.dictionary.values_sparsity=2", "--model.dictionary.epochs=3",
    "--model.dictionary.batch_size=64", "--model.dictionary.learning_rate=0.01",
]  # fmt: skip
KINDS = ("layer_groups", "divergence", "dictionary")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "disabled")


def words(toy: Path, *more: str) -> list[str]:
    fixed = [f"--model.path={toy / 'llama'}", f"--data.text={toy / 'text.txt'}", "--output=toy.safetensors", *SMALL]
    given = {word.split("=")[0] for word in more}
    return ["fit", *(word for word in fixed if word.split("=")[0] not in given), *more]


@pytest.fixture(scope="module")
def fitted(toy, tmp_path_factory):
    """The artifact's path of an uninterrupted fit, made in a folder of its own."""
    here = Path.cwd()
    os.chdir(tmp_path_factory.mktemp("uninterrupted"))
    try:
        assert main(words(toy)) == 0
        return Path("toy.safetensors").resolve()
    finally:
        os.chdir(here)


@pytest.mark.full
def test_the_artifact_holds_groups_divergences_and_dictionaries(fitted):
    artifact = Artifact.load(fitted)
    for stream, channels in (("keys", 32), ("values", 16)):
        groups, divergence, dictionary = (artifact.tensor(f"{stream}.{kind}") for kind in KINDS)
        assert dictionary.shape == (int(groups[-1]) + 1, 24, channels)
        assert dictionary.dtype == torch.float16
        assert float(divergence.max()) > 0
    config, metrics = artifact.provenance["config"]["dictionary"], artifact.provenance["metrics"]["dictionaries"]
    assert (config["atoms"], config["samples"], config["groups"], config["epochs"]) == (12, 900, "measured", 3)
    for stream, parts in (("keys", 1), ("values", 2)):
        mine = [row for row in metrics if row["stream"] == stream]
        assert [row["group"] for row in mine] == list(range(len(mine)))
        assert [layer for row in mine for layer in row["layers"]] == [0, 1, 2]
        for row in mine:
            assert row["samples"] == 900 * parts * len(row["layers"])
            assert row["atoms"] == 24
            assert 0 < row["loss"] < row["initial_loss"] < 1
            assert row["epochs"] == 3


def test_the_recorded_loss_is_that_of_the_artifacts_atoms_on_held_out_keys_before_rope(toy, fitted):
    assert len(check_losses(toy, Artifact.load(fitted), {"keys": 3, "values": 2})) >= 2


@pytest.mark.full
def test_keys_in_chunks_have_narrower_atoms(toy):
    """Keys in 4 chunks have atoms of 8 channels, whole values atoms of 32; `csr` takes both numbers of chunks from the artifact."""
    chunks = ["--model.dictionary.key_chunks=4", "--model.dictionary.value_chunks=1"]
    assert main(words(toy, *chunks, "--model.dictionary.keys_sparsity=1")) == 0
    artifact = Artifact.load("toy.safetensors")
    assert [artifact.tensor(f"{stream}.dictionary").shape[1:] for stream in ("keys", "values")] == [(24, 8), (24, 32)]
    rows = check_losses(toy, artifact, {"keys": 1, "values": 2})
    assert {row["samples"] // len(row["layers"]) for row in rows if row["stream"] == "keys"} == {4 * 900}
    with compress(toy_model(), "csr", artifact, sparsity=4) as cache:
        (tier,) = cache.layers[0].plan.tiers
        assert (tier.keys.codec.chunks, tier.values.codec.chunks) == (4, 1)


def check_losses(toy: Path, artifact: Artifact, pairs: dict[str, int]) -> list[dict]:
    """Check the recorded loss of each group and return the records. Keys and values are outputs of the model's own projections on
    the held-out text, cut into vectors of an atom's length; each is coded with `pairs` of its stream."""
    corpus = CaptureData(
        str(toy / "llama"), text=str(toy / "text.txt"), length=64, sequences=8, heldout_sequences=2, batch_size=2
    ).load()[2]
    model, projected = toy_model(), {"keys": [], "values": []}
    for layer in model.model.layers:
        for stream, projection in (("keys", layer.self_attn.k_proj), ("values", layer.self_attn.v_proj)):
            projection.register_forward_hook(lambda _, args, output, stream=stream: projected[stream].append(output))
    model(corpus.heldout)
    rows = artifact.provenance["metrics"]["dictionaries"]
    for row in rows:
        atoms = artifact.tensor(f"{row['stream']}.dictionary")[row["group"]].float()
        x = torch.cat([projected[row["stream"]][layer] for layer in row["layers"]]).reshape(-1, atoms.shape[1])
        error = x - desparsify(*matching_pursuit(x, atoms, pairs[row["stream"]]), atoms)
        relative = (error.square().sum(-1) / x.square().sum(-1)).mean().item()
        # float16 atoms; float32 keys whose order in memory was another one.
        assert relative == pytest.approx(row["loss"], rel=5e-3), row
    return rows


@pytest.mark.full
def test_each_layer_for_itself_and_all_layers_together(toy, tmp_path, capsys):
    (tmp_path / "layers.yaml").write_text("model: {dictionary: {groups: layers}}")
    assert main(words(toy, "--config=layers.yaml")) == 0
    apart = Artifact.load("toy.safetensors")
    assert apart.tensor("keys.layer_groups").tolist() == [0, 1, 2]
    assert apart.tensor("values.dictionary").shape == (3, 24, 16)
    shown = [line.split() for line in capsys.readouterr().out.splitlines()]
    for row in apart.provenance["metrics"]["dictionaries"]:
        losses = [f"{row[name]:.4f}" for name in ("initial_loss", "loss")]
        name = f"{row['stream']}.{row['group']}"
        assert [name, str(row["group"]), str(row["samples"]), "24", *losses, "3", str(row["dead"])] in shown
    assert main(words(toy, "--model.dictionary.delta1=1", "--model.dictionary.delta2=3")) == 0
    together = Artifact.load("toy.safetensors")
    assert together.tensor("values.layer_groups").tolist() == [0, 0, 0]
    assert together.tensor("keys.dictionary").shape == (1, 24, 32)
    for kind in ("keys.divergence", "values.divergence"):
        assert torch.equal(apart.tensor(kind), together.tensor(kind))


@pytest.mark.full
def test_without_dictionaries_the_rest_is_the_same(toy, fitted, tmp_path, capsys):
    assert main(words(toy, "--model.dictionary.atoms=0")) == 0
    some, whole = Artifact.load("toy.safetensors"), Artifact.load(fitted)
    assert some.tensors.keys() == {name for name in whole.tensors if name.split(".")[-1] not in KINDS}
    assert all(torch.equal(tensor, whole.tensors[name]) for name, tensor in some.tensors.items())
    assert "dictionaries" not in some.provenance["metrics"]
    assert some.provenance["config"]["dictionary"] == {"atoms": 0}
    assert "Dictionaries" not in capsys.readouterr().out
    assert not (tmp_path / "runs/toy/dictionaries.ckpt").exists()
    checkpoint = torch.load(tmp_path / "runs/toy/statistics.ckpt", weights_only=True)
    assert not any("vectors" in name for name in checkpoint["state_dict"])


@pytest.mark.full
def test_layers_that_slide_or_have_a_key_norm(tmp_path):
    for kind in ("gemma2", "gemma3"):
        save_toy(tmp_path / kind, kind)
        less = [word for word in SMALL if not word.startswith("--data.sequences")]
        assert main(["fit", f"--model.path={kind}", "--data.sequences=8", f"--output={kind}.safetensors", *less]) == 0
        assert Artifact.load(f"{kind}.safetensors").tensor("keys.layer_groups").shape == (3,)


class PowerCut(RuntimeError):
    pass


@pytest.mark.full
@pytest.mark.parametrize(("stage", "steps"), [("measuring", 3), ("training", 1), ("training", 13)])
def test_a_fit_that_fails_anywhere_goes_on_from_there(toy, fitted, tmp_path, monkeypatch, stage, steps):
    """4 batches of statistics and of sensitivities, 1 of clip factors, 1 of evaluation, then 3 epochs of 8 steps."""
    owner = Calibration if stage == "measuring" else NeuralDictionaries
    step, run = owner.training_step, []

    def counted(self, batch, batch_idx):
        run.append(batch_idx)
        if len(run) == steps + 1:
            raise PowerCut("the lights went out")
        step(self, batch, batch_idx)

    monkeypatch.setattr(owner, "training_step", counted)
    assert main(words(toy)) == 1
    assert not (tmp_path / "toy.safetensors").exists()
    if stage == "training":
        monkeypatch.setattr(Calibration, "training_step", lambda *_: pytest.fail("a finished stage ran again"))
    assert main(words(toy, "--ckpt_path=last")) == 0
    assert (tmp_path / "toy.safetensors").read_bytes() == fitted.read_bytes()
    # A finished run that is resumed runs no step.
    monkeypatch.setattr(Calibration, "training_step", lambda *_: pytest.fail("a finished stage ran again"))
    monkeypatch.setattr(NeuralDictionaries, "training_step", lambda *_: pytest.fail("a finished stage ran again"))
    Path("toy.safetensors").unlink()
    assert main(words(toy, "--ckpt_path=last")) == 0
    assert (tmp_path / "toy.safetensors").read_bytes() == fitted.read_bytes()


@pytest.mark.full
def test_a_fit_that_is_killed_while_it_trains_resumes_to_the_same_bytes(toy, fitted, tmp_path):
    code = (
        "import sys, time; from calib.neural_dict.module import NeuralDictionaries as D; step = D.training_step\n"
        "def slow(self, batch, i): step(self, batch, i); time.sleep(0.05)\n"
        "D.training_step = slow; from calib.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    process = subprocess.Popen([sys.executable, "-c", code, *words(toy)], stderr=subprocess.PIPE)
    checkpoint = tmp_path / "runs/toy/dictionaries.ckpt"
    deadline = time.monotonic() + 120
    while not checkpoint.exists():
        assert process.poll() is None, process.stderr.read().decode()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    process.stderr.close()
    assert not (tmp_path / "toy.safetensors").exists()
    assert main(words(toy, "--ckpt_path=last")) == 0
    assert (tmp_path / "toy.safetensors").read_bytes() == fitted.read_bytes()


@pytest.mark.full
def test_a_new_run_leaves_no_checkpoint_of_an_earlier_one(toy, tmp_path, monkeypatch):
    assert main(words(toy)) == 0

    def cut(*_):
        raise PowerCut("the lights went out")

    monkeypatch.setattr(Calibration, "training_step", cut)
    assert main(words(toy)) == 1
    assert not list((tmp_path / "runs/toy").glob("*.ckpt"))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--model.dictionary.atom=3"], "unknown key 'model.dictionary.atom' (did you mean 'model.dictionary.atoms'?)"),
        (["--model.dictionary.groups=all"], "invalid value 'all' for 'model.dictionary.groups'"),
        (
            ["--model.dictionary.groups=paper-32"],
            "is for models of 32 layers, this one has 3: use 'measured' or 'layers'",
        ),
        (["--model.dictionary.key_chunks=0"], "key_chunks=0: must be at least 1"),
        (["--model.dictionary.key_chunks=5"], "key_chunks=5: must divide the model's head_dim 32"),
        (
            ["--model.dictionary.key_chunks=4", "--model.dictionary.keys_sparsity=9"],
            "keys_sparsity=9: must be at most 8, the channels of an atom",
        ),
        (["--model.dictionary.value_chunks=5"], "value_chunks=5: must divide the model's head_dim 32"),
        (["--model.dictionary.keys_sparsity=33"], "keys_sparsity=33: must be at most 32, the channels of an atom"),
        (["--model.dictionary.values_sparsity=17"], "values_sparsity=17: must be at most 16, the channels of an atom"),
        (["--model.dictionary.atoms=451"], "a dictionary of 902 atoms needs as many vectors and has 900, of"),
        (
            ["--model.dictionary.atoms=129", "--data.sequences=2"],
            "needs as many vectors and has 256, of model.dictionary.sa",
        ),
        (["--model.dictionary.atoms=-1"], "model.dictionary.atoms=-1: must be at least 0"),
    ],
)
def test_what_cannot_be_is_one_line_before_anything_is_measured(toy, capsys, monkeypatch, more, message):
    monkeypatch.setattr(Calibration, "training_step", lambda *_: pytest.fail("measured all the same"))
    capsys.readouterr()
    assert main(words(toy, *more)) == 2
    (error,) = capsys.readouterr().err.strip().splitlines()
    assert error.startswith("calib: error: ")
    assert message in error
    assert not Path("toy.safetensors").exists()


@pytest.mark.full
def test_other_settings_do_not_continue_a_run(toy, capsys):
    assert main(words(toy)) == 0
    for option, before, now in (("epochs", 3, 4), ("samples", 900, 800), ("atoms", 12, 0)):
        capsys.readouterr()
        assert main(words(toy, "--ckpt_path=last", f"--model.dictionary.{option}={now}")) == 2
        assert f"had dictionary.{option} = {before}, now it is {now}" in capsys.readouterr().err


@pytest.mark.full
def test_figures_reach_the_logger(toy, tmp_path):
    less = [word for word in words(toy) if word != "--trainer.logger=false"]
    assert main(less) == 0
    (table,) = (tmp_path / "runs/toy").rglob("fit-dictionaries.csv")
    header, *rows = table.read_text().splitlines()
    assert header == "stream,group,layers,samples,atoms,initial_loss,loss,epochs,dead"
    assert len(rows) == len(Artifact.load("toy.safetensors").provenance["metrics"]["dictionaries"])
