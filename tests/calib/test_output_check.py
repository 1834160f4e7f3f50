"""An output that cannot be written is said before anything is loaded or measured, and nothing is left behind."""

import pytest

from calib import cli
from calib.output_check import check_file, check_folder

TUNE = ["tune", "--method", "kivi", "--bits", "3", "--artifact", "old.calib.safetensors"]


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (["fit", "--config", "tiny.yaml", "--output", "file/x.safetensors"], "output"),
        (
            ["fit", "--config", "tiny.yaml", "--output", "x.safetensors", "--trainer.default_root_dir", "file/x"],
            "trainer.default_root_dir",
        ),
        ([*TUNE, "--output", "file/x"], "--output"),
        ([*TUNE, "--html", "file/x.html"], "--html"),
        ([*TUNE, "--logs", "file"], "--logs"),
        (["eval", "--config", "eval/quick.yaml", "--output", "file/x"], "--output"),
        (["eval", "--config", "eval/quick.yaml", "--write-cases", "file/x"], "--write-cases"),
        (["bench", "--config", "bench/quick.yaml", "--output", "file/x"], "--output"),
    ],
)
def test_before_the_work(tmp_path, monkeypatch, capsys, words, option):
    monkeypatch.chdir(tmp_path)
    before = {tmp_path / "file": b"", tmp_path / "old.calib.safetensors": b"old"}
    for path, content in before.items():
        path.write_bytes(content)
    assert cli.main(words) == 2
    output, error = capsys.readouterr()
    assert not output and error.count("\n") == 1 and error.startswith(f"calib: error: {option} 'file")
    assert error.endswith("cannot be written (Not a directory); choose a folder with room and write permission\n")
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_what_can_be_written_is_not_made_yet(tmp_path):
    (tmp_path / "there").write_bytes(b"old")
    check_file("--output", tmp_path / "there")
    check_file("--output", tmp_path / "a" / "b")
    check_folder("--logs", tmp_path / "a" / "b")
    check_folder("--logs", tmp_path)
    assert list(tmp_path.iterdir()) == [tmp_path / "there"]
