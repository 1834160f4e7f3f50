"""`calib export --format artifact`: the new file has the tensors whose names match a pattern, unchanged, and no others."""

import pytest
import torch
from one_line import message
from toy_artifact import toy_artifact

from calib.errors import UsageError
from calib.export.artifact.command import run
from calib.runtime import Artifact


@pytest.fixture
def whole(tmp_path):
    artifact = toy_artifact()
    artifact.save(tmp_path / "whole.safetensors")
    return artifact


def export(folder, *patterns, output="part.safetensors"):
    return run(
        ["--artifact", str(folder / "whole.safetensors"), "--output", str(folder / output), "--tensors", *patterns]
    )


def test_what_fits_is_taken_with_its_numbers(whole, tmp_path, capsys):
    assert export(tmp_path, "keys.low", "keys.high", "values.clip.*") == 0
    part = Artifact.load(tmp_path / "part.safetensors")
    wanted = [name for name in whole.tensors if name in ("keys.low", "keys.high") or name.startswith("values.clip.")]
    assert list(part.tensors) == wanted and 2 < len(wanted) < len(whole.tensors)
    for name in wanted:
        assert torch.equal(part.tensors[name], whole.tensors[name])
    assert part.fingerprint == whole.fingerprint and part.clip_bits == whole.clip_bits
    assert part.provenance == {**whole.provenance, "tensors": ["keys.low", "keys.high", "values.clip.*"]}
    *listed, last = capsys.readouterr().out.splitlines()
    assert listed == wanted
    assert f"({len(wanted)} of {len(whole.tensors)} tensors, " in last


@pytest.mark.parametrize(
    ("patterns", "text"),
    [
        (
            ["keys.low", "keys.hihg"],
            "--tensors 'keys.hihg': fits none of this artifact's ",
        ),
        (["keys.klt.basis"], "--tensors: tensor 'keys.klt.basis' is present and 'keys.klt.mean' is not"),
    ],
)
def test_patterns_that_are_refused(whole, tmp_path, patterns, text):
    with pytest.raises(UsageError) as error:
        export(tmp_path, *patterns)
    assert text in message(error)
    assert not (tmp_path / "part.safetensors").exists()


def test_nothing_is_overwritten(whole, tmp_path):
    before = (tmp_path / "whole.safetensors").read_bytes()
    with pytest.raises(UsageError) as error:
        export(tmp_path, "keys.*", output="whole.safetensors")
    assert "exists already" in message(error)
    assert (tmp_path / "whole.safetensors").read_bytes() == before


def test_a_name_by_way_of_a_missing_folder_is_no_way_around(whole, tmp_path):
    """Missing folders are created, and then `missing/../whole` names the existing file, which is not overwritten."""
    before = (tmp_path / "whole.safetensors").read_bytes()
    with pytest.raises(UsageError, match="exists already"):
        export(tmp_path, "keys.*", output="missing/../whole.safetensors")
    assert (tmp_path / "whole.safetensors").read_bytes() == before
