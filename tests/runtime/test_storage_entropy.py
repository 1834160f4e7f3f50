"""Entropy coding of stored chunks: they decode to the same, and a reader written from the documentation finds the same codes."""

import math

import numpy as np
import pytest
import torch
from cases import calibrated_artifact
from damaged_blobs import resealed
from joint_chunks import ROLES, fields_of, usual, with_storage
from stored_chunks import HEADER, chunk_of
from toy_models import random_model

from calib.runtime import BlobError, Codec
from calib.runtime.artifact.component_widths import widths_at
from calib.runtime.storage import Header, entropy

constriction = pytest.importorskip("constriction", reason="the extra `entropy` (constriction) is not installed")

pytestmark = pytest.mark.arithmetic

BITS = 2.5


@pytest.fixture(scope="module")
def model():
    return random_model("llama")


@pytest.fixture(scope="module")
def artifact(model):
    return with_storage(calibrated_artifact(model))


def of_artifact(artifact, entropy=True, **options):
    return Codec.from_artifact(artifact, **{"bits": BITS, "entropy": entropy, **options})


def probabilities(width, step, middle):
    """The probabilities of a field's numbers, times 2^16, from the formula."""
    edges = [-math.inf, *((c - middle - 0.5) * 2 ** (step / 8) for c in range(1, 1 << width)), math.inf]
    below = [0.5 * math.erfc(-edge / math.sqrt(2)) for edge in edges]
    normal = np.diff(below)
    return np.round(2**16 * ((1 - 1 / 64) * normal + 1 / 64 / (1 << width))).clip(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bits", [0.5, BITS, 8])
@pytest.mark.parametrize("start", [0, 70_001])
def test_the_chunk_is_the_same_and_no_larger(model, artifact, start, bits, dtype):
    plain, coded = (of_artifact(artifact, asked, bits=bits) for asked in (False, True))
    for tokens in (1, 61):
        chunk = chunk_of(model, tokens, dtype=dtype)
        blob = coded.encode(chunk, start)
        assert len(blob) <= coded.size(tokens, start, dtype) == plain.size(tokens, start, dtype)
        assert Header.read(blob).entropy and Header.read(blob).payload_bytes == len(blob) - HEADER
        assert torch.equal(coded.decode(blob), plain.decode(plain.encode(chunk, start)))


def test_a_reader_from_the_documentation_finds_the_same_codes(artifact):
    """Tables follow from the artifact's steps and errors; fields with the same table are coded one after another."""
    coded, plain = of_artifact(artifact), of_artifact(artifact, False)
    chunk = usual(coded, 120)
    blob, fixed = (codec.encode(chunk, 9).numpy().tobytes() for codec in (coded, plain))
    assert len(blob) < 0.97 * len(fixed)
    allocation = widths_at({role: artifact.tensor(f"{role}.storage.errors") for role in ROLES}, BITS)
    tables, numbers, at = [], [], HEADER
    for layer in range(coded.layers):
        own = []
        for role in ROLES:
            widths = allocation.streams[role][layer].widths
            steps, errors = (artifact.tensor(f"{role}.storage.{kind}")[layer, 0] for kind in ("steps", "errors"))
            for number, bits in enumerate(widths):
                ratio = float(steps[number, bits - 1]) / math.sqrt(float(errors[number, 0]))
                own.append((bits, round(8 * math.log2(ratio)), (2**bits - 1) / 2))
            own.append((4, 0, 6.0))
        length = -(-sum(table[0] for table in own) // 16)
        words = np.frombuffer(fixed, "<u2", 120 * length, at).reshape(120, length)
        numbers.append(fields_of(words, [table[0] for table in own]))
        tables, at = tables + own, at + 2 * 120 * length
    wanted = np.concatenate(numbers, 1).astype(int)
    coder, expected = constriction.stream.queue.RangeDecoder(np.frombuffer(blob[HEADER:], "<u4")), 0.0
    for table in sorted(set(tables)):
        counts = probabilities(*table)
        found = constriction.stream.model.Categorical(counts.astype("f4"), perfect=False)
        for field in (field for field, own in enumerate(tables) if own == table):
            assert (coder.decode(found, 120) == wanted[:, field]).all()
            expected -= np.log2(counts / counts.sum())[wanted[:, field]].sum() / 8
    assert coder.maybe_exhausted()
    assert 0.99 * expected - 8 <= len(blob) - HEADER <= 1.01 * expected + 8


def test_codes_that_are_not_usual_stay_as_they_are(model, artifact):
    codec, chunk = of_artifact(artifact), chunk_of(model, 40)
    chunk[:, :, 1::2] = 1e4  # all codes at their ends
    assert len(codec.encode(chunk, 9)) == codec.size(40, 9)
    assert codec.decode(codec.encode(chunk, 9)).isfinite().all()


def test_a_layer_that_the_corpus_did_not_move(model, artifact):
    still = artifact.tensor("keys.storage.errors").clone()
    still[1] = 0
    changed = type(artifact)(
        {**artifact.tensors, "keys.storage.errors": still}, artifact.fingerprint, {}, artifact.clip_bits
    )
    coded, plain = (of_artifact(changed, asked, bits=8) for asked in (True, False))
    chunk = chunk_of(model, 20)
    assert torch.equal(coded.decode(coded.encode(chunk, 9)), plain.decode(plain.encode(chunk, 9)))


@pytest.mark.parametrize("bits", [0.5, BITS])
def test_any_bytes_are_refused_or_decode_to_finite_numbers(artifact, bits):
    codec, draw = of_artifact(artifact, bits=bits), np.random.default_rng(0)
    whole = codec.encode(usual(codec, 30), 9).numpy().tobytes()
    least, most = HEADER + codec._payload.entropy.least_bytes(30), codec.size(30, 9)
    refused = set()
    for _ in range(300):
        payload = draw.bytes(int(draw.integers(least, most + 1)) - HEADER)
        head = Header(**{**vars(Header.read(whole)), "payload_bytes": len(payload)})
        try:
            assert codec.decode(head.packed(memoryview(payload)) + payload).isfinite().all()
        except BlobError as error:
            refused.add(str(error).split(",")[0].split(";")[0].split(" have ")[-1])
    assert any("bytes" in line for line in refused)  # no whole words


@pytest.mark.parametrize("tokens", [1, 2, 7, 500])
def test_no_chunk_takes_less_than_it_may(artifact, tokens):
    """With the most frequent number in every field a blob has at least `least_bytes`, and little more."""
    codec = of_artifact(artifact)
    coder = codec._payload.entropy
    numbers = torch.tensor([int(table.counts().argmax()) for table in coder.tables]).expand(tokens, -1)
    parts = numbers.split([len(own.widths) for own in coder.fields], -1)
    blocks = [{"words": own.packed(part)} for own, part in zip(coder.fields, parts, strict=True)]
    found = coder.coded(blocks)
    assert coder.least_bytes(tokens) <= len(found) <= 1.05 * coder.least_bytes(tokens) + 24
    assert torch.equal(coder.words(found, tokens), torch.cat([block["words"].flatten() for block in blocks]))


def test_many_tokens_in_few_bytes_are_refused_before_anything_is_made(artifact):
    codec = of_artifact(artifact)
    blob = bytearray(codec.encode(usual(codec, 30), 9).numpy().tobytes())
    blob[36:40] = (2**29).to_bytes(4, "little")
    with pytest.raises(BlobError, match=r"the blob has [\d]+ bytes, expected \d+ to \d+ for 536870912 tokens"):
        codec.decode(resealed(bytes(blob)))


def test_the_forms_refuse_each_others_blobs(model, artifact):
    chunk, coded, plain = chunk_of(model, 5), of_artifact(artifact), of_artifact(artifact, False)
    assert coded.identity != plain.identity
    for reader, writer in ((coded, plain), (plain, coded)):
        with pytest.raises(BlobError, match=f"entropy of the blob is {writer is coded}, expected {reader is coded}"):
            reader.decode(writer.encode(chunk, 0))


def test_tables_of_another_machine_are_refused(model, artifact, monkeypatch):
    ours = of_artifact(artifact)
    monkeypatch.setattr(entropy, "FLAT", entropy.FLAT * 1.01)
    theirs = of_artifact(artifact)
    with pytest.raises(BlobError, match="layout of the blob"):
        ours.decode(theirs.encode(chunk_of(model, 5), 0))


def test_what_it_refuses(artifact, monkeypatch):
    for options, message in (
        ({"entropy": 1}, "entropy must be True or False, got 1"),
        ({"profile": "heads"}, r"needs the profile 'storage', got profile='heads', .*leave entropy or these out"),
        ({"predict": False}, r"needs the profile 'storage', got .*predict=False; leave entropy or these out"),
        ({"trellis": True}, r"needs the profile 'storage', which has no trellis, .*leave one of them out"),
        ({"heads": range(1)}, r"codes all \d+ KV heads together, got heads=range\(0, 1\) .*leave entropy out"),
        ({"fixed_size": True}, r"entropy=True with fixed_size=True.*leave one of them out"),
    ):
        with pytest.raises(ValueError, match=message):
            of_artifact(artifact, **options)
    monkeypatch.setattr(entropy, "constriction", None)
    with pytest.raises(ValueError, match=r"needs the package constriction: pip install 'calib-kv\[entropy\]'"):
        of_artifact(artifact)
