"""The artifact: round trips, equal bytes, atomic saving, and lookups of tensors and clip factors."""

import json
import os
import signal
import struct
import subprocess
import sys
import textwrap

import pytest
import safetensors
import torch
from toy_artifact import CLIP_BITS, toy_artifact, toy_tensors

from calib.runtime.artifact import file as artifact_file
from calib.runtime.artifact.artifact import Artifact, ArtifactError


def in_python(script: str, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


# ---- the file


def test_load_gives_back_what_was_saved(tmp_path):
    saved = toy_artifact()
    saved.save(tmp_path / "a.calib.safetensors")
    loaded = Artifact.load(tmp_path / "a.calib.safetensors")
    assert loaded.tensors.keys() == toy_tensors().keys()
    for name, tensor in toy_tensors().items():
        assert loaded.tensors[name].dtype == tensor.dtype
        assert torch.equal(loaded.tensors[name], tensor)
    assert loaded.fingerprint == saved.fingerprint
    assert loaded.provenance == saved.provenance
    assert loaded.clip_bits == CLIP_BITS


@pytest.mark.parametrize(
    "tensor",
    [torch.zeros(0, 3), torch.tensor(2.5), torch.ones(3, dtype=torch.bool), torch.arange(12.0).reshape(3, 4).T]
    + [torch.ones(3, dtype=dtype) for dtype in artifact_file.DTYPES],
    ids=lambda tensor: f"{tensor.dtype}-{list(tensor.shape)}",
)
def test_any_shape_and_dtype_of_an_unregistered_tensor_survives(tmp_path, tensor):
    toy_artifact(tensors={"later": tensor}).save(tmp_path / "a")
    loaded = Artifact.load(tmp_path / "a").tensor("later")
    assert loaded.dtype == tensor.dtype
    assert torch.equal(loaded, tensor)


def test_an_artifact_without_tensors_survives(tmp_path):
    toy_artifact(tensors={}, clip_bits=()).save(tmp_path / "a")
    assert Artifact.load(tmp_path / "a").tensors == {}


def test_the_file_is_what_the_specification_says(tmp_path):
    path = tmp_path / "a"
    toy_artifact().save(path)
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    assert length % 8 == 0
    assert header["__metadata__"].keys() == {"format_version", "calib"}
    assert header["__metadata__"]["format_version"] == "1"
    text = header["__metadata__"]["calib"]
    document = json.loads(text)
    assert text == json.dumps(document, sort_keys=True, separators=(",", ":"))
    assert sorted(document) == ["clip_bits", "fingerprint", "provenance", "sha256", "tensors"]
    with safetensors.safe_open(path, framework="pt") as other_reader:  # any safetensors reader opens it
        assert set(other_reader.keys()) == set(toy_tensors())
        assert torch.equal(other_reader.get_tensor("keys.low"), toy_tensors()["keys.low"])


@pytest.mark.full
def test_the_same_content_gives_the_same_bytes_in_every_process(tmp_path):
    toy = toy_artifact()
    toy.save(tmp_path / "first")
    script = """
        import sys
        from calib.runtime.artifact.artifact import Artifact
        toy = Artifact.load(sys.argv[1])
        backwards = dict(reversed(toy.tensors.items()))
        provenance = dict(reversed(toy.provenance.items()))
        Artifact(backwards, toy.fingerprint, provenance, toy.clip_bits).save(sys.argv[2])
    """
    hash_seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"  # not that of this process
    done = in_python(script, tmp_path / "first", tmp_path / "second", PYTHONHASHSEED=hash_seed)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "second").read_bytes() == (tmp_path / "first").read_bytes()
    # safetensors itself orders metadata differently from file to file: eight files would show that within one process
    for index in range(8):
        toy.save(tmp_path / f"again{index}")
        assert (tmp_path / f"again{index}").read_bytes() == (tmp_path / "first").read_bytes()


def test_saving_what_was_loaded_gives_the_same_bytes(tmp_path):
    toy_artifact().save(tmp_path / "a")
    Artifact.load(tmp_path / "a").save(tmp_path / "b")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_the_artifact_keeps_its_own_copy_and_leaves_its_inputs_alone():
    tensors = toy_tensors()
    artifact = toy_artifact(tensors=tensors)
    tensors["keys.low"].fill_(99)
    assert torch.equal(artifact.tensor("keys.low"), toy_tensors()["keys.low"])


@pytest.mark.full
def test_importing_the_artifact_loads_no_heavy_package():
    done = in_python(
        "import sys, calib.runtime.artifact.artifact\n"
        "print(*sorted({'lightning', 'datasets', 'wandb', 'onnx'} & sys.modules.keys()))"
    )
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr


# ---- saving atomically


@pytest.mark.full
def test_a_save_killed_while_writing_leaves_the_old_file(tmp_path):
    path = tmp_path / "a"
    toy_artifact().save(path)
    before = path.read_bytes()
    done = in_python(
        """
        import os, signal, sys
        from calib.runtime.artifact.artifact import Artifact
        old = Artifact.load(sys.argv[1])
        os.fsync = lambda number: os.kill(os.getpid(), signal.SIGKILL)  # after the write, before the rename
        Artifact(old.tensors, old.fingerprint, {"seed": 8}, old.clip_bits).save(sys.argv[1])
        """,
        path,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert path.read_bytes() == before


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_failed_save_leaves_the_old_file_and_no_other(tmp_path, monkeypatch, call):
    path = tmp_path / "a"
    toy_artifact().save(path)
    before = path.read_bytes()

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(ArtifactError, match="No space left on device"):
        toy_artifact(provenance={"seed": 8}).save(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_an_interrupted_save_leaves_no_temporary_file(tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        toy_artifact().save(tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


def test_saving_to_a_folder_is_refused(tmp_path):
    with pytest.raises(ArtifactError, match="cannot be written"):
        toy_artifact().save(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_saving_makes_missing_folders_and_follows_links(tmp_path):
    toy_artifact().save(tmp_path / "new" / "a")
    (tmp_path / "link").symlink_to(tmp_path / "new" / "a")
    toy_artifact(provenance={"seed": 8}).save(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert Artifact.load(tmp_path / "new" / "a").provenance == {"seed": 8}


# ---- lookups


def test_a_missing_tensor_names_who_wants_it_what_there_is_and_who_measures_it():
    artifact = toy_artifact(tensors={"keys.low": toy_tensors()["keys.low"]})
    assert artifact.has("keys.low")
    assert not artifact.has("keys.high")
    with pytest.raises(
        ArtifactError, match=r"'kivi' needs tensor 'keys\.high'.*'channel_range' of `calib fit`.*holds keys\.low"
    ):
        artifact.tensor("keys.high", wanted_by="kivi")
    with pytest.raises(ArtifactError, match="no calibrator of `calib fit` measures it"):
        artifact.tensor("keys.hihg")


@pytest.mark.parametrize(
    ("name", "calibrator"),
    [
        ("values.scale", "channel_scale"),
        ("keys.balancer", "balancer"),
        ("queries.mean_square", "query_energy"),
        ("values.clip.1x32", "clip"),
        ("values.high", "channel_range"),
        ("keys.layer_groups", "layer_groups"),
        ("values.divergence", "layer_groups"),
        ("keys.dictionary", "dictionaries"),
        ("values.rotation", "rotations"),
    ],
)
def test_every_registered_tensor_has_its_calibrator(name, calibrator):
    with pytest.raises(ArtifactError, match=f"calibrator '{calibrator}' of"):
        toy_artifact(tensors={}).tensor(name)


@pytest.mark.parametrize("name", ["queries.dictionary", "keys.dictionary.0", "dictionary", "keys.layer_group"])
def test_names_that_only_resemble_registered_ones_have_none(name):
    with pytest.raises(ArtifactError, match="no calibrator of `calib fit` measures it"):
        toy_artifact(tensors={}).tensor(name)


def test_clip_picks_the_bit_width():
    artifact = toy_artifact()
    for index, bits in enumerate(CLIP_BITS):
        assert torch.equal(artifact.clip("keys", "32x1", bits), toy_tensors()["keys.clip.32x1"][:, :, index])
    assert torch.equal(artifact.clip("values", "scaled.1x32", 2), toy_tensors()["values.clip.scaled.1x32"][:, :, 1])


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (("keys", "64x1", 2), r"form '64x1' at 2 bits; this artifact has the forms 32x1, fixed at 1, 2, 3, 4 bits"),
        (("values", "1x32", 8), r"at 8 bits; this artifact has the forms 1x32, scaled\.1x32 at 1, 2, 3, 4 bits"),
        (("queries", "1x32", 2), r"stream 'queries', expected one of keys, values"),
    ],
)
def test_a_missing_clip_names_the_forms_and_bits_there_are(request_, message):
    with pytest.raises(ArtifactError, match=message):
        toy_artifact().clip(*request_)
