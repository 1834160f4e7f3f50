"""Stored chunks in the profile `storage`, with joint bases of a layer's heads and predictions across layers, by the formulas."""

import pytest
import torch
from cases import calibrated_artifact
from joint_chunks import ROLES, decoded, fields_of, with_storage
from stored_chunks import HEADER, chunk_of
from toy_models import random_model

from calib.runtime import Artifact, ArtifactError, BlobError, Codec
from calib.runtime.artifact.component_widths import widths_at
from calib.runtime.storage import Header
from calib.runtime.storage.bit_fields import BitFields

pytestmark = pytest.mark.arithmetic

BITS = 2.5


@pytest.fixture(scope="module")
def model():
    return random_model("llama")


@pytest.fixture(scope="module")
def artifact(model):
    return with_storage(calibrated_artifact(model))


def of_artifact(artifact, **options):
    return Codec.from_artifact(artifact, **{"bits": BITS, **options})


def without(artifact, part):
    tensors = {name: tensor for name, tensor in artifact.tensors.items() if part not in name}
    return Artifact(tensors, artifact.fingerprint, artifact.provenance, artifact.clip_bits)


@pytest.mark.parametrize("bits", [0.5, BITS])
@pytest.mark.parametrize("start", [0, 70_001])
def test_a_blob_says_what_the_formulas_say(model, artifact, start, bits):
    chunk = chunk_of(model, 61)
    codec = of_artifact(artifact, sinks=7, bits=bits)
    blob = codec.encode(chunk, start)
    wanted, off = decoded(blob.numpy().tobytes(), artifact, bits, codec.rotation.frequencies, start, chunk)
    found, exact = codec.decode(blob).double(), max(0, 7 - start)
    assert torch.equal(found[:, :, :exact], chunk[:, :, :exact].double())
    found, wanted = found[:, :, exact:], wanted[:, :, exact:]
    # As in the profile `heads`: tables have 16 bits.
    assert float((found - wanted).abs().max()) < 4e-3 * float(wanted.abs().max())
    assert 0.9 < off < 1.05


def test_layers_and_heads_help(model, artifact):
    """Values that are predicted from those of the layer before have a smaller error."""
    chunk = chunk_of(model, 200, seed=2)
    width = chunk.shape[-1]
    chunk[1, 1] = chunk[1, 0] + 0.01 * chunk[1, 1]
    nothing = {
        name: 0 * artifact.tensor(name) for role in ROLES for name in (f"{role}.storage.mean", f"{role}.storage.matrix")
    }
    told = {name: tensor.clone() for name, tensor in nothing.items()}
    told["values.storage.matrix"][1, width : 2 * width] = torch.eye(width)  # of the values of the layer before
    errors = []
    for changed in (told, nothing):
        codec = of_artifact(
            Artifact({**artifact.tensors, **changed}, artifact.fingerprint, {}, artifact.clip_bits), bits=4
        )
        errors.append(float((codec.decode(codec.encode(chunk, 9)) - chunk)[1, 1].norm()))
    assert errors[0] < 0.6 * errors[1]


@pytest.mark.parametrize("start", [0, 129, 2**20 + 7])
def test_a_chunk_may_be_cut_anywhere(model, artifact, start, monkeypatch):
    codec, chunk = of_artifact(artifact), chunk_of(model, 100, seed=3)
    whole = codec.decode(codec.encode(chunk, start))
    for cuts in ([60, 40], [1] * 100):
        parts, at = [], start
        for part in chunk.split(cuts, 2):
            parts.append(codec.decode(codec.encode(part, at)))
            at += part.shape[2]
        assert torch.equal(torch.cat(parts, 2), whole)
    monkeypatch.setattr("calib.runtime.storage.codec.TILE_TOKENS", 7)
    assert torch.equal(codec.decode(codec.encode(chunk, start)), whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_sizes_are_known_and_bits_are_kept_to(model, artifact, dtype):
    for bits in (0.5, 1, 2.5, 8):
        codec, chunk = of_artifact(artifact, bits=bits), chunk_of(model, 30, dtype=dtype)
        blob = codec.encode(chunk, 2)
        values = chunk[:, :, 0].numel()
        assert (
            len(blob) == codec.size(30, 2, dtype) == HEADER + 30 * codec.bytes_per_token + 2 * values * dtype.itemsize
        )
        assert codec.bits == 8 * codec.bytes_per_token / values <= bits
        # No more than a word a layer is left over, nor what one step of the price gives to several components.
        assert codec.bits > bits - 0.25 or bits == 8
        assert codec.decode(blob).dtype == dtype


def test_the_widths_are_those_of_least_error(artifact):
    """No bit would reduce the error more elsewhere: no component's next bit reduces it more than any component's last bit does."""
    errors = {role: artifact.tensor(f"{role}.storage.errors").double() for role in ROLES}
    found = widths_at(errors, 2.0)
    last, following = [], []
    for role in ROLES:
        for layer, words in enumerate(found.streams[role]):
            table = errors[role][layer, 0]
            widths = [*words.widths, *[0] * (len(table) - len(words.widths))]
            last += [float(row[width - 1] - row[width]) for row, width in zip(table, widths, strict=True) if width > 1]
            following += [
                float(row[width] - row[width + 1]) for row, width in zip(table, widths, strict=True) if width < 8
            ]
    assert max(following) <= min(last) * (1 + 1e-9)


def test_fields_of_any_widths_come_back():
    draw = torch.Generator().manual_seed(0)
    for count in (1, 2, 3, 50, 191):
        widths = torch.randint(1, 9, (count,), generator=draw).tolist()
        numbers = torch.stack([torch.randint(0, 1 << width, (7,), generator=draw) for width in widths], -1)
        fields = BitFields(tuple(widths))
        words = fields.packed(numbers)
        assert words.shape == (7, -(-sum(widths) // 16)) and torch.equal(fields.unpacked(words).long(), numbers)
        assert (fields_of(words.numpy().view("u2"), widths) == numbers.numpy()).all()


def test_the_artifact_and_the_options_decide_the_profile(artifact):
    assert of_artifact(artifact).profile == of_artifact(artifact, heads=range(2)).profile == "storage"
    for options in ({"profile": "heads"}, {"heads": range(1)}, {"size": False}, {"predict": True}):
        assert of_artifact(artifact, **options).profile == "heads"
    bare = without(artifact, "storage")
    assert of_artifact(bare).profile == "heads"
    heads, known = of_artifact(bare), of_artifact(artifact, profile="heads")
    assert heads.identity == known.identity != of_artifact(artifact).identity


def test_the_profiles_refuse_each_others_blobs(model, artifact):
    joint, heads = (of_artifact(artifact, profile=name, size=True) for name in ("storage", "heads"))
    chunk = chunk_of(model, 5)
    assert Header.read(joint.encode(chunk, 0)).joint and not Header.read(heads.encode(chunk, 0)).joint
    for reader, writer, said in ((joint, heads, "False, expected True"), (heads, joint, "True, expected False")):
        with pytest.raises(BlobError, match=f"joint of the blob is {said}"):
            reader.decode(writer.encode(chunk, 0))


def test_any_payload_decodes_to_finite_numbers(model, artifact):
    """A forged blob has a matching checksum. Numbers are finite also if each layer's predictions enlarge those of the last one."""
    large = {f"{role}.storage.matrix": 1e6 * artifact.tensor(f"{role}.storage.matrix") for role in ROLES}
    codec = of_artifact(Artifact({**artifact.tensors, **large}, artifact.fingerprint, {}, artifact.clip_bits))
    blob = codec.encode(chunk_of(model, 40), 0).numpy().tobytes()
    header = Header.read(blob)
    for payload in (b"\xff" * header.payload_bytes, b"\0" * header.payload_bytes):
        exact = blob[HEADER : len(blob) - 40 * codec.bytes_per_token]
        payload = exact + payload[len(exact) :]
        assert codec.decode(header.packed(memoryview(payload)) + payload).isfinite().all()


def test_what_it_refuses(model, artifact):
    chunk = chunk_of(model, 5)
    chunk[1, 0, 3, 7] = torch.nan
    with pytest.raises(ValueError, match="NaN or infinite entries"):
        of_artifact(artifact).encode(chunk, 0)
    for options, message in (
        ({"profile": "all"}, "profile must be one of heads, storage, got 'all'"),
        ({"profile": "storage", "heads": range(1)}, r"bases cover all KV heads of a layer.*use profile='heads'"),
        ({"profile": "storage", "size": False}, "it always uses both; leave them out"),
        ({"profile": "storage", "trellis": True}, "its levels are uniform; leave one of them out"),
        ({"bits": 0.01}, r"bits must be a number from 0\.125 to 8, got 0\.01"),
    ):
        with pytest.raises(ValueError, match=message):
            of_artifact(artifact, **options)
    assert of_artifact(artifact).profile == "storage" and of_artifact(artifact, trellis=True).profile == "heads"
    with pytest.raises(ArtifactError, match=r"'keys\.storage\.basis'.*`calib fit --model\.storage true` measures it"):
        of_artifact(without(artifact, "storage"), profile="storage")
