"""Shards of a fit as machines measure them: processes of their own, at the same time, in one folder."""

import pytest
from fit_processes import at_once
from shard_fits import check_equal, words

from calib.cli import main
from calib.runtime.artifact.artifact import Artifact


@pytest.mark.full
def test_two_processes_at_once_give_the_artifact_of_one(toy, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    files = [f"shard.{number}.safetensors" for number in (1, 2)]
    shards = [
        ["fit", *words(toy, f"--shard={number}/2", f"--output={file}")] for number, file in enumerate(files, start=1)
    ]
    whole = ["fit", *words(toy, "--output=one.safetensors")]
    for end in at_once([*shards, whole], tmp_path):
        assert end.status == 0, end.errors
    assert main(["merge", *files, *words(toy, "--output=merged.safetensors")]) == 0
    check_equal(Artifact.load("one.safetensors"), Artifact.load("merged.safetensors"))
