"""The output of a first `calib fit`: at once what it will do, a line for each silent phase, the files it leaves; and its help."""

import pytest

from calib import cli
from calib.capture import data as capture_data

SMALL = [
    "--model.bits=[2,4]", "--model.clip_factors=[1,0.8]", "--model.clip_sequences=2", "--data.length=64", "--data.sequences=8",
    "--data.heldout_sequences=2", "--model.dictionary.atoms=16", "--model.dictionary.samples=256",
    "--model.dictionary.heldout_samples=64", "--model.dictionary.epochs=1", "--trainer.accelerator=cpu", "--trainer.logger=false",
    "--trainer.enable_progress_bar=false",
]  # fmt: skip


@pytest.mark.full
def test_a_fit_needs_no_configuration_and_says_at_once_what_it_does(toy, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    load, said = capture_data.load, []

    def slow(*asked):
        said.append(capsys.readouterr().out)
        return load(*asked)

    monkeypatch.setattr(capture_data, "load", slow)
    asked = ["fit", f"--model.path={toy / 'llama'}", f"--data.text={toy / 'text.txt'}"]
    assert cli.main([*asked, *SMALL]) == 0
    assert (tmp_path / "llama.calib.safetensors").is_file()
    first, loading = said[0].splitlines()
    assert first == f"fit of {toy / 'llama'} on text.txt; writes llama.calib.safetensors, and its run into runs/llama"
    assert loading == f"calib: loading the model {toy / 'llama'} ..."
    shown = capsys.readouterr().out
    phases = [
        "reading text.txt",
        "comparing layers for their dictionaries",
        "measuring the loss of klt head by head",
        "measuring the loss of klt at 6 budgets",
    ]
    assert [shown.index(f"calib: {phase} ...") for phase in phases] == sorted(
        shown.index(f"calib: {phase} ...") for phase in phases
    )
    left = shown.split("left in runs/llama: ")[1].splitlines()[0]
    assert left.startswith("clip.ckpt, dictionaries.ckpt, evaluate.ckpt, sensitivity.ckpt, statistics.ckpt (")
    assert "only --ckpt_path last reads them" in left


def test_sampled_sequences_are_told_before_they_are_made(toy, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    asked = ["fit", f"--model.path={toy / 'llama'}", f"--data.text={toy / 'text.txt'}", "--data.sampled=0.5"]
    assert cli.main([*asked, *SMALL, "--model.dictionary.atoms=0", "--model.klt=false"]) == 0
    shown = capsys.readouterr().out
    assert "calib: sampling 4 sequences of 64 tokens from the model ..." in shown
    assert "comparing layers" not in shown and "klt" not in shown


def test_the_help_has_the_fits_own_options_before_lightnings(capsys):
    with pytest.raises(SystemExit) as left:
        cli.main(["fit", "--help"])
    assert left.value.code == 0
    text = capsys.readouterr().out
    usage, options = text.split("\noptions:", 1)
    for part in (usage, options):
        theirs = part.index("--trainer.accelerator")
        assert all(part.index(own) < theirs for own in ("--output", "--plan", "--model.path", "--data.text"))
