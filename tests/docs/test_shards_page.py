"""The scripts for many machines in docs/scale.md: the arguments that a shell passes to `calib` are run at toy size."""

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import torch
from documented import Command, snippets, text_of
from documented_runs import inside
from documents_sandbox import SMALL_FIT, as_words

from calib.cli import main
from calib.runtime.artifact.artifact import Artifact

PAGE = "docs/scale.md"
# Shell functions that replace the machines: `calib` prints its command in one line, and nothing is copied.
MACHINES = 'calib() { echo calib "$@"; }; ssh() { shift; "$@"; }; scp() { :; }\n'
SMALLER = SMALL_FIT | {"data.batch_size": 1, "model.dictionary.atoms": 0, "model.klt": False, "model.bits": [2]}
EXACT = ("keys.low", "values.high", "values.scale", "keys.balancer", "keys.outliers.head.high", "values.clip.1x*")


def commands(script: str, **variables: str) -> list[list[str]]:
    """The `calib` commands of a script, as a shell in the working folder expands them."""
    done = subprocess.run(
        ["bash", "-euc", MACHINES + script], env=os.environ | variables, capture_output=True, text=True, check=True
    )
    return [shlex.split(line) for line in done.stdout.splitlines()]


def run_all(sandbox, folder: Path, script: str) -> None:
    """Run a script, once for each task of its Slurm array."""
    array = re.search(r"--array=1-(\d+)", script)
    for task in range(1, int(array[1]) + 1 if array else 2):
        with inside(folder, {}):
            found = commands(script, SLURM_ARRAY_TASK_ID=str(task))
            # Fits on other machines end in any order, and the merge comes after them.
            for words in sorted(found, key=lambda words: words[1]):
                sandbox.provide(Command(PAGE, 0, tuple(words)), folder)
                assert main([*words[1:], *as_words(SMALLER)]) == 0, words


@pytest.mark.full
def test_scripts_give_the_artifact_of_one_machine(sandbox):
    folder = sandbox.folder("shards")
    (folder / "shards").mkdir()
    run_all(sandbox, folder, "calib fit --config llama2.yaml --output one.calib.safetensors")
    one = Artifact.load(folder / "one.calib.safetensors")
    section = text_of(PAGE).partition("\n## Many machines\n")[2].partition("\n## ")[0]
    slurm = ["\n".join(block.lines) for block in snippets(PAGE, "slurm")]
    ssh = ["\n".join(block.lines) for block in snippets(PAGE, "text") if any("ssh " in line for line in block.lines)]
    assert len(slurm) == 3 and len(ssh) == 1 and ssh[0].splitlines()[0] in section
    for scripts, files in ((slurm, 8), (ssh, 2)):
        for script in scripts:
            run_all(sandbox, folder, script)
        measured = [*folder.glob("shards/*.safetensors")] if scripts is slurm else [*folder.glob("first.*.safetensors")]
        assert len(measured) == files
        found = Artifact.load(folder / "llama2.calib.safetensors")
        (folder / "llama2.calib.safetensors").unlink()
        assert found.tensors.keys() == one.tensors.keys()
        for name in EXACT:
            assert torch.equal(found.tensors[name], one.tensors[name]), name
        torch.testing.assert_close(
            found.tensors["queries.mean_square"], one.tensors["queries.mean_square"], rtol=2**-22, atol=0
        )
