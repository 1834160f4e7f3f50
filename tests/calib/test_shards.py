"""Shards of a corpus, measured one after another as on as many machines, merge into the artifact of one machine."""

import json
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch
from safetensors import safe_open
from shard_fits import check_equal, words
from toy_language_model import save_toy, toy_model

from calib.capture.batches import TokenBatches
from calib.capture.shard import Shard
from calib.cli import main
from calib.errors import UsageError
from calib.fit.calibration import Calibration
from calib.runtime.artifact.artifact import Artifact


def measure(toy: Path, count: int, name: str, given: list[str], *more: str) -> list[str]:
    """Measure every shard of a round, with the files `given` of earlier rounds; return the new files."""
    found = []
    for number in range(1, count + 1):
        output = f"{name}.{number}.safetensors"
        command = ["merge", *given] if given else ["fit"]
        assert main([*command, *words(toy, *more), f"--shard={number}/{count}", f"--output={output}"]) == 0
        found.append(output)
    return found


@pytest.fixture(scope="module")
def shards(toy, tmp_path_factory):
    """A folder with two rounds of two shards: `first.1.safetensors` ... `clip.2.safetensors`."""
    folder = tmp_path_factory.mktemp("shards")
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        first = measure(toy, 2, "first", [])
        measure(toy, 2, "clip", first)
    return folder


FILES = ["first.1.safetensors", "first.2.safetensors", "clip.1.safetensors", "clip.2.safetensors"]


@pytest.fixture
def copied(shards, tmp_path, monkeypatch):
    """The test's own copies, in the folder it runs in."""
    for name in FILES:
        shutil.copy(shards / name, tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.full
def test_shards_give_the_artifact_of_one_machine(toy, copied):
    """Nine sequences in batches of two: the second shard has fewer."""
    assert main(["fit", *words(toy, "--output=one.safetensors")]) == 0
    assert main(["merge", *FILES, *words(toy, "--output=merged.safetensors")]) == 0
    check_equal(Artifact.load("one.safetensors"), Artifact.load("merged.safetensors"))


class PowerCut(RuntimeError):
    pass


@pytest.mark.full
def test_a_shard_and_a_merge_that_were_cut_go_on(toy, copied, monkeypatch):
    """They give the bytes of uninterrupted ones, in any order of the files; a merge after one round gives an equal artifact."""
    step = Calibration.training_step

    def cut(stage, batch):
        def cut_step(self, captured, batch_idx):
            if (self.stage.name, batch_idx) == (stage, batch):
                raise PowerCut
            step(self, captured, batch_idx)

        monkeypatch.setattr(Calibration, "training_step", cut_step)

    shard = ["fit", *words(toy, "--shard=1/2", "--output=again.safetensors", "--ckpt_path=last")]
    cut("sensitivity", 1)
    assert main(shard) == 1 and not Path("again.safetensors").exists()
    monkeypatch.setattr(Calibration, "training_step", step)
    assert main(shard) == 0
    assert Path("again.safetensors").read_bytes() == Path(FILES[0]).read_bytes()
    merge = words(toy, "--output=merged.safetensors", "--ckpt_path=last")
    cut("evaluate", 1)
    assert main(["merge", *FILES, *merge]) == 1
    monkeypatch.setattr(Calibration, "training_step", step)
    assert main(["merge", *reversed(FILES), *merge]) == 0
    assert main(["merge", *FILES, *words(toy, "--output=straight.safetensors")]) == 0
    assert Path("merged.safetensors").read_bytes() == Path("straight.safetensors").read_bytes()
    assert main(["merge", *FILES[:2], *words(toy, "--output=one_round.safetensors")]) == 0
    check_equal(Artifact.load("straight.safetensors"), Artifact.load("one_round.safetensors"))


@pytest.mark.slow
def test_every_stage_in_shards_with_every_statistic(toy, tmp_path, monkeypatch):
    """Three shards, more than some stages have batches; `kvquant` and `oscar` as well; the last merge measures nothing."""
    monkeypatch.chdir(tmp_path)
    more = ["--model.nuq=[0.05]", "--model.rotations=true", "--model.sensitivity_sequences=4"]
    assert main(["fit", *words(toy, *more, "--output=one.safetensors")]) == 0
    given: list[str] = []
    for name in ("statistics", "sensitivity", "clip", "evaluate"):
        found = measure(toy, 3, name, given, *more)
        assert document(Path(found[0]))["stages"] == [name]
        given += found
    assert main(["merge", *given, *words(toy, *more, "--output=merged.safetensors")]) == 0
    assert not list(Path("runs/merged").glob("[!d]*.ckpt"))  # but that of the dictionaries
    saved = torch.load("runs/one/evaluate.ckpt", weights_only=True)["state_dict"]
    moments = {
        f"{stream}.rotation": saved[f"statistics.rotations.{name}"]
        for stream, name in (("keys", "queries"), ("values", "outputs"))
    }
    check_equal(Artifact.load("one.safetensors"), Artifact.load("merged.safetensors"), moments)


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_every_batch_is_in_one_shard_whatever_the_processes_of_its_machine(processes):
    sequences = torch.arange(22)[:, None].repeat(1, 3)
    for count in (1, 2, 4, 7):
        seen = []
        for number in range(1, count + 1):
            every = 1 + (number + processes) % 3
            parts = [
                TokenBatches(sequences, 0, 4, rank=rank, processes=every, shard=Shard(number, count))
                for rank in range(every)
            ]
            assert len({len(part) for part in parts}) == 1
            seen += [int(row[0]) for part in parts for batch in part for row in batch.tokens]
        assert sorted(seen) == list(range(22))


def document(path: Path) -> dict:
    with safe_open(path, "pt") as file:
        return json.loads(file.metadata()["calib_shard"])


def rewrite(path: str, tensors: dict | None = None, **changed: object) -> None:
    """Write the shard's file again with other metadata or tensors."""
    found = document(Path(path)) | changed
    tensors = safetensors.torch.load_file(path) | (tensors or {})
    safetensors.torch.save_file(tensors, path, {"calib_shard": json.dumps(found)})


def other_version() -> None:
    rewrite(FILES[1], versions=document(Path(FILES[1]))["versions"] | {"torch": "1.0"})


def cut_short() -> None:
    Path(FILES[1]).write_bytes(Path(FILES[1]).read_bytes()[:-10])


def flipped() -> None:
    found = bytearray(Path(FILES[1]).read_bytes())
    found[-100] ^= 1
    Path(FILES[1]).write_bytes(found)


REFUSED = {
    "missing": (lambda: None, FILES[1:], "shard 1/2 of statistics and sensitivity is missing: 1 of 2 are given"),
    "a round missing": (
        lambda: None,
        FILES[2:],
        "has clip, but these options need statistics and sensitivity first, of which no shard is given",
    ),
    "twice": (
        lambda: shutil.copy(FILES[0], "again.safetensors"),
        [*FILES, "again.safetensors"],
        "first.1.safetensors and again.safetensors are both shard 1/2 of statistics and sensitivity",
    ),
    "other division": (
        lambda: rewrite(FILES[1], shard="2/3"),
        FILES,
        "first.1.safetensors is shard 1/2 of statistics and sensitivity and first.2.safetensors is 2/3",
    ),
    "other base": (lambda: rewrite(FILES[2], base="0"), FILES, "clip was measured after other shards than those given"),
    "version": (other_version, FILES, "first.2.safetensors: was measured with version of torch = '1.0', here it is"),
    "stage": (
        lambda: rewrite(FILES[2], stages=["knit"]),
        FILES[:3],
        "has knit, but these options need clip first, of which no shard is given",
    ),
    "format": (lambda: rewrite(FILES[0], format="2"), FILES, "has format '2', expected '1'"),
    "kind": (lambda: rewrite(FILES[0], sums=[]), FILES, "its 'sums' is []"),
    "number": (lambda: rewrite(FILES[0], shard="3/2"), FILES, "shard='3/2': expected K/N"),
    "no shard": (
        lambda: safetensors.torch.save_file({"x": torch.ones(1)}, FILES[0]),
        FILES,
        "first.1.safetensors: is no shard of a fit; `calib fit --shard K/N` writes one",
    ),
    "no file": (lambda: Path(FILES[3]).unlink(), FILES, "clip.2.safetensors: no such file"),
    "cut short": (cut_short, FILES, "first.2.safetensors: cannot be read"),
    "a bit": (flipped, FILES, "was changed after it was written; measure this shard again"),
    "a shape": (
        lambda: rewrite(FILES[0], {"channel_range.keys_low": torch.ones(3)}),
        FILES,
        "channel_range.keys_low is torch.float32 [3], expected torch.float32 [3, 2, 32]",
    ),
    "bases": (
        lambda: rewrite(FILES[3], {"signature": safetensors.torch.load_file(FILES[3])["signature"].flip(-1)}),
        FILES,
        "clip.2.safetensors: was measured in bases of klt that differ by",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(toy, copied, capsys, name):
    spoil, files, message = REFUSED[name]
    spoil()
    assert main(["merge", *files, *words(toy, "--output=never.safetensors")]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("calib: error: ") and message in error
    assert not Path("never.safetensors").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--data.batch_size=4"],
            "was measured with batch_size = 2, here it is 4: shards and their merge need the same",
        ),
        (["--model.query_rows=5"], "was measured with query_rows = 4, here it is 5"),
        (["--seed_everything=1"], "was measured with data.tokens_sha256 = "),
        (["--model.path=other/llama"], "was measured with weights = "),
        (["--plan"], "plan=True: a plan is for a whole fit on one machine"),
        (["--shard=0/2"], "shard='0/2': expected K/N, K from 1 to N"),
    ],
)
def test_other_options_than_the_shards_had(toy, copied, capsys, options, message):
    save_toy(Path("other/llama"), model=toy_model(seed=1))
    assert main(["merge", *FILES, *words(toy, *options, "--output=never.safetensors")]) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_a_command_without_files_or_without_a_name_for_its_own(toy, capsys):
    assert main(["merge", "--help"]) == 0
    assert "usage: calib merge SHARD" in capsys.readouterr().out
    assert main(["merge", *words(toy)]) == 2
    assert "no file to merge" in capsys.readouterr().err
    assert main(["fit", *words(toy, "--shard=1/2")]) == 2
    assert "shard=1/2: name the file to write as well" in capsys.readouterr().err
    with pytest.raises(UsageError, match="shard='2 of 8'"):
        Shard.of("2 of 8")


def test_a_shard_does_not_take_an_artifacts_name(toy, tmp_path, monkeypatch, capsys):
    """Also if the name is that of the configuration, and an artifact has it already."""
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text("output: mine.calib.safetensors\n")
    Path("mine.calib.safetensors").write_bytes(b"an artifact")
    assert main(["fit", "--config=mine.yaml", *words(toy, "--shard=1/2")]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "output 'mine.calib.safetensors' is an artifact's name" in error and "--output first.1.safetensors" in error
    assert Path("mine.calib.safetensors").read_bytes() == b"an artifact"
