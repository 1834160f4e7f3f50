"""Blobs from a shared store: anything but an intact blob of this codec is refused in one line, before memory is allocated for
it."""

import struct
from random import Random

import pytest
import torch
from cases import calibrated_artifact
from damaged_blobs import NUMBERS, resealed
from one_line import message
from stored_chunks import HEADER, chunk_of
from toy_models import random_model

from calib.runtime import Artifact, BlobError, Codec
from calib.runtime.storage import Header

pytestmark = pytest.mark.arithmetic

TOKENS = 9
EXACT = 2 * 2 * 64 * 4  # bytes of an exact token: keys and values, 2 layers, 64 channels, float32
WHOLE = {"<B": [0, 4, 255], "<H": [0, 2, 2**16 - 1], "<I": [0, 1, 3, 2**16, 2**31 - 1, 2**31, 2**32 - 1]}
HUGE = {
    "<Q": [2**30 - TOKENS + 1, 2**31, 2**62, 2**63 - 1, 2**63, 2**64 - 1],
    "<d": [0.0, -2.5, 1e308, *map(float, ("inf", "nan"))],
}
FIXED = {"<Q": [0, 2**64 - 1]}


@pytest.fixture(scope="module")
def model():
    return random_model("llama")


@pytest.fixture(scope="module")
def codec(model):
    return Codec.from_artifact(calibrated_artifact(model), bits=2, size=True)


@pytest.fixture(scope="module")
def blob(codec, model):
    """The blob of a chunk that begins at position 2: the codec stores two of its tokens exactly."""
    return codec.encode(chunk_of(model, TOKENS), 2).numpy().tobytes()


@pytest.fixture
def refused(codec, monkeypatch):
    """A function that asserts that a blob is refused, without allocating memory before (unless `allocated`), and returns the
    message."""

    def none(*_, **__):
        raise AssertionError("memory was asked for before the blob was refused")

    def told(data, allocated: bool = False) -> str:
        with monkeypatch.context() as patch:
            for name in () if allocated else ("torch.empty", "torch.frombuffer"):
                patch.setattr(name, none)
            with pytest.raises(BlobError) as error:
                codec.decode(data)
        assert message(error).isprintable()
        return message(error)

    return told


def test_the_whole_blob_is_accepted(codec, blob):
    assert codec.decode(blob).isfinite().all() and resealed(blob) == blob


def test_any_flipped_bit_is_found(refused, blob):
    every = range(8 * len(blob))
    for bit in [*every[: 8 * HEADER], *Random(0).sample(every[8 * HEADER :], 400)]:
        data = bytearray(blob)
        data[bit // 8] ^= 1 << bit % 8
        refused(data)


def test_truncated_and_longer_blobs_are_refused(refused, blob):
    for length in [*range(HEADER + 2), *range(HEADER + 2, len(blob), 7), len(blob) - 1]:
        refused(blob[:length])
        refused(resealed(blob[:length]) if length >= HEADER else blob[:length])
    for more in (b"\0", b"\0\0", blob, bytes(10_000)):
        assert "expected" in refused(blob + more) and refused(resealed(blob + more))


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_that_are_not_ours_are_refused(refused, blob, name):
    """Wrong numbers in the header, with a correct checksum."""
    form, at = NUMBERS[name]
    for number in {**WHOLE, **HUGE}[form] if name != "payload" else FIXED[form]:
        data = bytearray(blob)
        struct.pack_into(form, data, at, number)
        if bytes(data) != blob:
            refused(resealed(bytes(data)))


def test_lengths_that_agree_with_each_other_and_with_no_blob_are_refused(refused, codec, blob):
    """Numbers of tokens and payload bytes that fit each other but not the blob of nine tokens, up to billions of tokens."""
    data = bytearray(blob)
    for tokens in (TOKENS - 1, TOKENS + 1, 2**30 - 101, 2**32 - 1):
        struct.pack_into("<I", data, 36, tokens)
        struct.pack_into("<Q", data, 56, tokens * codec.bytes_per_token + 2 * EXACT)
        refused(resealed(bytes(data)))


def test_positions_and_counts_out_of_range_are_refused_where_all_lengths_agree(refused, codec, model):
    """A chunk of no token, and positions beyond those of any cache, with correct lengths and checksum."""
    blob = codec.encode(chunk_of(model, TOKENS), 100).numpy().tobytes()
    for start in (2**30 - TOKENS + 1, 2**31, 2**63, 2**64 - 1):
        data = bytearray(blob)
        struct.pack_into("<Q", data, 40, start)
        assert "expected positions below 1073741824" in refused(resealed(bytes(data)))
    data = bytearray(blob[:HEADER])
    struct.pack_into("<I", data, 36, 0)
    struct.pack_into("<Q", data, 56, 0)
    assert "the blob has 0 tokens" in refused(resealed(bytes(data)))


@pytest.mark.full
def test_blobs_of_other_codecs_are_refused(refused, blob, model):
    artifact = calibrated_artifact(model)
    changed = {**artifact.tensors, "keys.klt.before.mean": artifact.tensors["keys.klt.before.mean"] + 1e-3}
    other_model = random_model("llama", rope_parameters={"rope_theta": 5000.0, "rope_type": "default"})
    rank = {"heads": range(1)}
    for name, one, options in (
        ("bits", artifact, {"bits": 3}),
        ("predict", artifact, {"predict": False}),
        ("size", artifact, {"size": False}),
        ("trellis", artifact, {"trellis": True}),
        ("heads", artifact, rank),
        ("artifact", Artifact(changed, artifact.fingerprint, artifact.provenance, artifact.clip_bits), {}),
        ("artifact", calibrated_artifact(other_model), {}),
    ):
        other = Codec.from_artifact(one, **{"bits": 2, "size": True, **options})
        chunk = chunk_of(model, TOKENS)[..., : len(other.heads) * other.head_dim]
        told = refused(other.encode(chunk, 2))
        assert told.startswith(f"{name} of the blob is ") and told.endswith("; compute these tokens again")
    ranks = [Codec.from_artifact(artifact, bits=2, heads=heads) for heads in (range(1), range(1, 2))]
    own = ranks[0].encode(chunk_of(model, TOKENS)[..., :32], 2)
    with pytest.raises(BlobError, match=r"heads of the blob is range\(0, 1\), expected range\(1, 2\)"):
        ranks[1].decode(own)


def test_headers_on_other_codes_are_refused(refused, codec, blob, model):
    for tokens, start, seed in ((TOKENS, 2, 5), (TOKENS, 3, 0), (TOKENS, 100, 0), (TOKENS - 1, 2, 0)):
        other = codec.encode(chunk_of(model, tokens, seed=seed), start).numpy().tobytes()
        refused(other[:HEADER] + blob[HEADER:])
        refused(blob[:HEADER] + other[HEADER:])


def test_what_is_no_blob_is_refused(refused, blob):
    good = torch.frombuffer(bytearray(blob), dtype=torch.uint8)
    wrong = [None, "calibkv", 7, [1, 2], good.float(), good[None], good.view(torch.int8), memoryview(blob)[::2]]
    for data in wrong:
        refused(data)
    draw = Random(1)
    for length in (0, 1, 127, 128, 129, len(blob)):
        refused(draw.randbytes(length))
        refused(
            resealed(blob[:12] + draw.randbytes(length)) if length >= HEADER else blob[:12] + draw.randbytes(length)
        )
    for data in (b"", None, blob[:50], b"x" * 200):
        with pytest.raises(BlobError):
            Header.read(data)


def test_thousands_of_changes_at_once(refused, codec, blob):
    """2,000 blobs with runs of bytes overwritten, copied, inserted or cut; every other one with a corrected checksum, so that other
    checks must refuse it, or, if its header and length are unchanged, decoding gives finite numbers."""
    draw, good, decoded = Random(2), 0, 0
    for number in range(2000):
        data = bytearray(blob)
        for _ in range(draw.choice([1, 1, 2, 5])):
            at = draw.choice([draw.randrange(HEADER), draw.randrange(len(data) or 1)])
            run = draw.choice([1, 2, 4, 8, 64])
            other = draw.randrange(len(data) or 1)
            new = draw.choice([draw.randbytes(run), b"\xff" * run, bytes(run), data[other : other + run]])
            stop = at + draw.choice([len(new), len(new), 0, 2 * run])
            data[at:stop] = new
        sealed = number % 2 == 1 and len(data) >= HEADER
        data = resealed(bytes(data)) if sealed else bytes(data)
        if data == blob:
            good += 1
        elif not sealed:
            refused(data)
        elif len(data) != len(blob) or data[:112] != blob[:112]:
            assert "checksum" not in refused(data)
        elif torch.tensor(struct.unpack_from(f"<{2 * EXACT // 4}f", data, HEADER)).isfinite().all():
            assert codec.decode(data).isfinite().all()
            decoded += 1
        else:
            assert "exact tokens with NaN or infinite entries" in refused(data, allocated=True)
    assert good < 500 and decoded > 50


def test_exact_tokens_that_are_not_finite_are_refused(refused, blob):
    for value in ("nan", "inf", "-inf"):
        for at in (0, EXACT - 4, 2 * EXACT - 4):
            data = bytearray(blob)
            struct.pack_into("<f", data, HEADER + at, float(value))
            assert "exact tokens with NaN or infinite entries" in refused(resealed(bytes(data)), allocated=True)


def test_codes_with_a_checksum_that_fits_decode_to_something_finite(codec, model):
    """A writer of the store can write any codes, since a checksum is no authentication; they decode to finite numbers all the
    same."""
    draw, blob = Random(3), codec.encode(chunk_of(model, TOKENS), 100).numpy().tobytes()
    for fill in (b"\0", b"\xff", b"\x80", None):
        rest = draw.randbytes(len(blob) - HEADER) if fill is None else fill * (len(blob) - HEADER)
        found = codec.decode(resealed(blob[:HEADER] + rest))
        assert found.shape == (2, 2, TOKENS, 64) and found.isfinite().all() and float(found.abs().max()) < 1e4


def test_a_store_that_is_overwritten_while_it_is_read_changes_nothing(codec, blob, monkeypatch):
    """`decode` checks and decodes a copy of the bytes."""
    shared, wanted = bytearray(blob), codec.decode(blob)
    along = codec.rotation.along

    def overwritten(*given):
        shared[:] = bytes(len(shared))
        return along(*given)

    monkeypatch.setattr(type(codec.rotation), "along", lambda _, *given: overwritten(*given))
    assert torch.equal(codec.decode(shared), wanted) and not any(shared)
