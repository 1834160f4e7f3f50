"""Stored chunks (`Codec`): codes are those of `klt`'s cache, decoding follows the formulas, no token depends on another."""

import pytest
import torch
from cases import calibrated_artifact
from layer_walk import Tokens, feed, stored
from stored_chunks import HEADER, allocation_of, chunk_of, decoded
from toy_models import FAMILIES, biased_model, random_model

from calib.kernels.attend.operation import STRIDE
from calib.runtime import Artifact, ArtifactError, Codec, compress
from calib.runtime.artifact.component_bits import ROLES
from calib.runtime.methods.klt import Klt
from calib.runtime.rotation import Rotation
from calib.runtime.storage import BlobError, Header

pytestmark = pytest.mark.arithmetic

UNIFORM = [
    {"size": False, "predict": False, "trellis": False},
    {"size": True, "predict": False, "trellis": False},
    {"size": True, "predict": True, "trellis": False},
]
FORMS = [*UNIFORM, {"size": False, "trellis": True}, {"size": True, "predict": True, "trellis": True}]
BITS = 2.5


@pytest.fixture(scope="module")
def model():
    """In float32: `.to(bfloat16)` would round its frequencies as well, which loading in bfloat16 does not."""
    return random_model("llama")


@pytest.fixture(scope="module")
def artifact(model):
    return calibrated_artifact(model)


def without(artifact, part):
    tensors = {name: tensor for name, tensor in artifact.tensors.items() if part not in name}
    return Artifact(tensors, artifact.fingerprint, artifact.provenance, artifact.clip_bits)


def of_artifact(artifact, **options):
    return Codec.from_artifact(artifact, **{"bits": BITS, **options})


def by_head(chunk, heads=2):
    return chunk.unflatten(-1, (heads, -1))


@pytest.mark.parametrize("forms", FORMS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_codes_are_those_of_a_cache(forms, dtype):
    """Bit for bit, for the same tokens at the same positions; decoded values differ only by rounding. The model has four KV heads:
    with two, sizes take a byte in a cache, which leaves more bits to codes."""
    model = random_model("llama", num_attention_heads=8, num_key_value_heads=4, head_dim=16)
    artifact = calibrated_artifact(model)
    cache = compress(model, "klt", artifact=artifact, bits=BITS, **forms, window=0, sinks=0, block=10)
    cache.release()
    tokens = Tokens.random(model, 150, seed=1)
    tokens.keys[..., ::17, :] *= 5
    tokens = Tokens(*(part.to(dtype) for part in (tokens.queries, tokens.keys, tokens.values)))
    feed(cache, [tokens])
    chunk = torch.stack([tokens.keys, tokens.values]).transpose(2, 3).flatten(3)
    codec = of_artifact(artifact, sinks=0, **forms)
    blob = codec.encode(chunk, 0)
    assert codec.bits == BITS and codec.bytes_per_token * 8 == BITS * chunk[:, :, 0].numel()
    held = stored(cache, 0)
    names = [
        f"{role}.{name}" for role in ("keys", "values") for name in (["words", "sizes"] if forms["size"] else ["words"])
    ]
    wanted = [held[f"{layer}.tier 0.{name}"][0].flatten() for layer in range(2) for name in names]
    assert torch.equal(blob[HEADER:].view(torch.int16), torch.cat(wanted))
    found = by_head(codec.decode(blob), 4).float()
    for layer, own in enumerate(cache.compressed):
        for stream, tier in zip(found[:, layer], own.store.decoded(0)[0], strict=True):
            expected = tier.transpose(0, 1).to(dtype).float()
            assert (
                float((stream - expected).abs().max())
                <= 2 * torch.finfo(dtype).eps * float(expected.abs().max()) + 2e-5
            )


@pytest.mark.parametrize("forms", FORMS, ids=str)
@pytest.mark.parametrize("start", [0, 5, 70_001])
def test_a_blob_says_what_the_formulas_say(model, artifact, forms, start):
    chunk, klt = chunk_of(model, 61), Klt(bits=BITS, **forms)
    codec = of_artifact(artifact, sinks=7, **forms)
    blob = codec.encode(chunk, start)
    data = blob.numpy().tobytes()
    wanted, off = decoded(data, artifact, klt, codec.rotation.frequencies, start, chunk)
    found = by_head(codec.decode(blob)).double()
    exact = max(0, 7 - start)
    assert torch.equal(found[:, :, :exact], by_head(chunk)[:, :, :exact].double())
    found, wanted = found[:, :, exact:], wanted[:, :, exact:]
    # Tables have 16 bits: entries of the inverse transform are rounded to 2^-12 of the largest step, predictions to 2^-16.
    assert float((found - wanted).abs().max()) < 4e-3 * float(wanted.abs().max())
    # Every code is the nearest, but for the rounding of tables: entries of the transform have 16 bits of a component of 32
    # channels. From a trellis state it is 9/8 of that away at most, and a path may choose another to come nearer later.
    assert 0.9 < off < (3 if klt.trellis else 1.05)
    _, elsewhere = decoded(data, artifact, klt, codec.rotation.frequencies, start + 1, chunk)
    assert elsewhere > 2  # the formulas at the next position are far from these codes


@pytest.mark.parametrize("forms", FORMS, ids=str)
def test_with_more_bits_the_chunk_comes_back(model, artifact, forms):
    chunk = chunk_of(model, 80)
    codecs = [of_artifact(artifact, bits=bits, **forms) for bits in (2, 4, 8)]
    errors = [float((codec.decode(codec.encode(chunk, 40)) - chunk).norm() / chunk.norm()) for codec in codecs]
    assert errors[0] > 1.3 * errors[1] and errors[1] > 1.3 * errors[2]


@pytest.mark.parametrize("forms", FORMS, ids=str)
@pytest.mark.parametrize("start", [0, 129, 2**20 + 7])
def test_a_chunk_may_be_cut_anywhere(model, artifact, forms, start, monkeypatch):
    """100 tokens, 60 and 40, and one by one: the same bits come back."""
    codec, chunk = of_artifact(artifact, **forms), chunk_of(model, 100, seed=3)
    whole = codec.decode(codec.encode(chunk, start))
    for cuts in ([60, 40], [1] * 100):
        parts, at = [], start
        for part in chunk.split(cuts, 2):
            parts.append(codec.decode(codec.encode(part, at)))
            at += part.shape[2]
        assert torch.equal(torch.cat(parts, 2), whole)
    monkeypatch.setattr("calib.runtime.storage.codec.TILE_TOKENS", 7)  # the pieces in which a chunk is coded
    assert torch.equal(codec.decode(codec.encode(chunk, start)), whole)


def test_angles_do_not_depend_on_where_a_chunk_begins(model, artifact, monkeypatch):
    """Cosines are composed from two tables; computed from another first position on, one in a billion would be rounded otherwise.
    So they begin at multiples of STRIDE."""
    codec, along, asked = of_artifact(artifact), Rotation.along, []

    def recorded(rotation, start, stop, device):
        asked.append(start)
        return along(rotation, start, stop, device)

    monkeypatch.setattr(Rotation, "along", recorded)
    monkeypatch.setattr("calib.runtime.storage.codec.TILE_TOKENS", 50)
    for start in (0, 63, 64, 1001):
        codec.decode(codec.encode(chunk_of(model, 120), start))
    assert len(asked) == 24 and not any(start % STRIDE for start in asked)


@pytest.mark.parametrize("forms", FORMS, ids=str)
@pytest.mark.parametrize("bits", [1.0, 2.5])
def test_slices_of_heads_are_the_whole(forms, bits):
    """Slices of four KV heads, as tensor-parallel ranks have them; at one bit some slices have streams without a word."""
    model = random_model("llama", num_attention_heads=8, num_key_value_heads=4, head_dim=16)
    artifact, chunk = calibrated_artifact(model), chunk_of(model, 50, seed=4)
    whole = Codec.from_artifact(artifact, bits=bits, **forms)
    wanted, parts, bare = whole.decode(whole.encode(chunk, 2)), [], 0
    allocation = allocation_of(artifact, Klt(bits=bits, **forms))
    for heads in (range(1), slice(1, 2), range(2, 4)):
        codec = Codec.from_artifact(artifact, bits=bits, heads=heads, **forms)
        own = by_head(chunk, 4)[..., heads.start : heads.stop, :].flatten(3)
        blob = codec.encode(own, 2)
        assert len(blob) == codec.size(50, 2, torch.float32)
        streams = [words for role in ROLES for words in allocation.streams[role]]
        bare += sum(not any(words.counts[heads.start : heads.stop]) for words in streams)
        parts.append(by_head(codec.decode(blob), codec.heads.stop - codec.heads.start))
    assert torch.equal(torch.cat(parts, 3).flatten(3), wanted)
    assert bits > 1 or bare


def test_sizes_are_known_beforehand(model, artifact):
    for forms in FORMS:
        codec, fixed = (of_artifact(artifact, fixed_size=flag, **forms) for flag in (False, True))
        for tokens, start, exact in ((1, 0, 1), (2, 3, 1), (63, 1, 3), (300, 0, 4), (300, 4, 0), (3, 99, 0)):
            for dtype in (torch.float32, torch.bfloat16):
                chunk, a_token = chunk_of(model, tokens, dtype=dtype), 2 * 2 * 64 * dtype.itemsize
                blob = codec.encode(chunk, start)
                assert len(blob) == codec.size(tokens, start, dtype)
                assert len(blob) == HEADER + tokens * codec.bytes_per_token + exact * a_token
                other = fixed.encode(chunk, start)
                assert (
                    len(other)
                    == fixed.size(tokens, start, dtype)
                    == fixed.size(tokens, 0, dtype)
                    == codec.size(tokens, 0, dtype)
                )
                assert torch.equal(fixed.decode(other), codec.decode(blob))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_first_tokens_of_a_text_are_exact(model, artifact, dtype):
    """And no others: exact are a chunk's tokens at positions below `sinks`, whichever chunk it is."""
    chunk = chunk_of(model, 10, dtype=dtype)
    for fixed_size in (False, True):
        for start, exact in ((0, 6), (4, 2), (5, 1), (6, 0), (60, 0)):
            codec = of_artifact(artifact, sinks=6, fixed_size=fixed_size)
            same = (codec.decode(codec.encode(chunk, start)) == chunk).all(-1).all(0).all(0)
            assert same.tolist() == [token < exact for token in range(10)]
    assert of_artifact(artifact).size(10) - of_artifact(artifact, sinks=0).size(10) == 4 * 2 * 2 * 64 * 2


@pytest.mark.parametrize("trellis", [False, True])
def test_a_header_says_what_the_blob_is(model, artifact, trellis):
    codec = of_artifact(artifact, heads=range(1, 2), size=True, trellis=trellis)
    chunk = chunk_of(model, 12, dtype=torch.float16)[..., 32:]
    header = Header.read(codec.encode(chunk, 77).numpy().tobytes())
    assert (header.tokens, header.start, header.heads, header.dtype) == (12, 77, range(1, 2), torch.float16)
    assert (header.layers, header.kv_heads, header.head_dim, header.bits) == (2, 2, 32, BITS)
    assert header.size and header.predict and header.trellis is trellis
    assert header.payload_bytes == codec.size(12, 77) - HEADER


def test_any_view_is_encoded_and_left_alone_and_decoded_into(model, artifact):
    """A chunk may be a strided view of an engine's larger buffer, and such a view may be given as `out` to decode to."""
    codec, chunk = of_artifact(artifact), chunk_of(model, 40, dtype=torch.bfloat16)
    buffer = torch.zeros(2, 80, 2, 64, dtype=torch.bfloat16)
    view = buffer[:, 10:50].transpose(1, 2)
    view.copy_(chunk)
    before = buffer.clone()
    blob = codec.encode(view, 2)
    assert torch.equal(blob, codec.encode(chunk, 2)) and torch.equal(buffer, before)
    wanted = codec.decode(blob)
    for given in (blob.numpy().tobytes(), bytearray(blob.numpy()), memoryview(blob.numpy()), blob.numpy()):
        assert torch.equal(codec.decode(given), wanted)
    assert codec.decode(blob, out=view) is view and torch.equal(view, wanted)
    buffer[:, 10:50] = before[:, 10:50]
    assert torch.equal(buffer, before)  # nothing beside it


def test_the_artifact_decides_the_forms(artifact):
    lower = {
        name: tensor / 4 for name, tensor in artifact.tensors.items() if name.split(".")[-2:] == ["sized", "errors"]
    }
    lower["values.klt.predicted.errors"] = artifact.tensor("values.klt.predicted.errors") / 4
    helped = Artifact(artifact.tensors | lower, artifact.fingerprint, artifact.provenance, artifact.clip_bits)
    for bare, expected in (
        (helped, (True, True)),
        (without(helped, "predicted"), (True, False)),
        (without(helped, "sized"), (False, False)),
        (artifact, (False, False)),  # of random tokens, whose errors they raise
    ):
        codec = of_artifact(bare)
        assert (codec.sized, codec.predicts) == expected
    assert not of_artifact(helped, size=False).predicts


def test_a_trellis_lowers_the_error_at_the_same_bits(model, artifact):
    draw = torch.Generator().manual_seed(5)
    chunk = torch.randn(2, 2, 300, 64, generator=draw)
    uniform, trellis = (of_artifact(artifact, bits=4, sinks=0, trellis=flag) for flag in (False, True))
    assert uniform.bytes_per_token == trellis.bytes_per_token
    errors = [float((codec.decode(codec.encode(chunk, 9)) - chunk).square().mean()) for codec in (uniform, trellis)]
    assert errors[1] < 0.95 * errors[0]


def test_a_reader_of_uniform_levels_reads_no_trellis(model, artifact):
    """At 8 bits every component has the most bits, so that the two codecs differ in nothing else."""
    codecs = {flag: of_artifact(artifact, bits=8, trellis=flag) for flag in (False, True)}
    assert codecs[False].identity != codecs[True].identity
    for flag, codec in codecs.items():
        with pytest.raises(BlobError, match=f"trellis of the blob is {flag}, expected {not flag}"):
            codecs[not flag].decode(codec.encode(chunk_of(model, 3), 9))


def test_a_file_gives_the_same_codec(model, artifact, tmp_path):
    artifact.save(tmp_path / "a.safetensors")
    chunk = chunk_of(model, 20)
    blob = of_artifact(artifact).encode(chunk, 1)
    other = of_artifact(tmp_path / "a.safetensors")
    assert torch.equal(other.encode(chunk, 1), blob) and torch.equal(
        other.decode(blob), of_artifact(artifact).decode(blob)
    )


MODELS = {
    **{name: lambda name=name: random_model(name) for name in FAMILIES},
    "qwen2": biased_model,
    "phi, half of the channels": lambda: biased_model(partial=True),
    "llama 3": lambda: random_model(
        "llama",
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "yarn": lambda: random_model(
        "llama",
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 1024,
        },
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_positions_turn_keys_as_the_model_does(name):
    """Without the model: RoPE's frequencies from the artifact are the model's, bit for bit, and so are codes."""
    model = MODELS[name]()
    artifact, rotation = calibrated_artifact(model), Rotation.of(model, "")
    codec = of_artifact(artifact, size=True)
    assert torch.equal(codec.rotation.frequencies, rotation.frequencies) and codec.rotation.scaling == rotation.scaling
    chunk = chunk_of(model, 30)
    blob = codec.encode(chunk, 11)
    assert torch.equal(blob, of_artifact(artifact, size=True, rotation=rotation).encode(chunk, 11))
    klt = Klt(bits=BITS, size=True, predict=True, trellis=False)
    wanted, off = decoded(blob.numpy().tobytes(), artifact, klt, rotation.frequencies, 11, chunk)
    assert off < 1.05
    found = codec.decode(blob).double().reshape(wanted.shape)
    assert float((found - wanted).abs().max()) < 4e-3 * float(wanted.abs().max())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits": 0}, "bits must be a number above 0, got 0"),
        ({"bits": None}, "bits must be a number above 0, got None"),
        ({"rotation": "llama"}, "rotation must be a Rotation, got 'llama'"),
        ({"bits": 9}, "bits must be a number from 0.25"),
        ({"size": "yes"}, "size must be True or False, got 'yes'"),
        ({"size": False, "predict": True}, "predict=True with size=False"),
        ({"sinks": -1}, "sinks must be a whole number from 0, got -1"),
        ({"sinks": 65536}, "sinks must be a whole number, at most 65535, got 65536"),
        ({"fixed_size": 1}, "fixed_size must be True or False, got 1"),
        ({"trellis": 1}, "trellis must be True or False, got 1"),
        ({"heads": range(3)}, r"heads must be a range without gaps within 0 ... 2, got range\(0, 3\)"),
        ({"heads": range(1, 1)}, "heads must be a range without gaps"),
        ({"heads": slice(0, 2, 2)}, "heads must be a range without gaps"),
        ({"heads": slice(-1, None)}, "heads must be a range without gaps"),
        ({"heads": [0]}, r"heads must be a range without gaps within 0 ... 2, got \[0\]"),
    ],
)
def test_options_that_it_refuses(artifact, options, message):
    with pytest.raises(ValueError, match=message):
        of_artifact(artifact, **options)


def test_artifacts_that_it_refuses(artifact):
    with pytest.raises(ValueError, match="the artifact has no statistics of keys before RoPE, which chunks store"):
        of_artifact(without(artifact, "klt.before"))
    with pytest.raises(ArtifactError, match=r"needs tensor 'keys\.klt\.sized\.errors', which is not in this artifact"):
        of_artifact(without(artifact, "sized"), size=True)
    with pytest.raises(ArtifactError, match="no such file"):
        of_artifact("nowhere.safetensors")

    def of_rope(**changes):
        model = random_model("llama", rope_parameters={"rope_theta": 10000.0, "rope_type": "default", **changes})
        return calibrated_artifact(model)

    with pytest.raises(ValueError, match=r"LlamaRotaryEmbedding has RoPE of type 'dynamic'.*pass rotation="):
        of_artifact(of_rope(rope_type="dynamic", factor=2.0))
    fingerprint = {**artifact.fingerprint, "architecture": "of nobody"}
    other = Artifact(artifact.tensors, fingerprint, artifact.provenance, artifact.clip_bits)
    with pytest.raises(ArtifactError, match="transformers cannot make a configuration of architecture 'of nobody'"):
        of_artifact(other)
    given = of_artifact(other, rotation=of_artifact(artifact).rotation)
    assert given.bytes_per_token == of_artifact(artifact).bytes_per_token


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("forms", FORMS, ids=str)
def test_finite_entries_may_be_as_large_as_the_dtype_holds(model, artifact, forms, dtype):
    """Their sum is infinite in float32. Entries outside the ranges of a code are cut, so what comes back is finite."""
    codec, chunk = of_artifact(artifact, **forms), torch.full((2, 2, 70, 64), 3e36, dtype=dtype)
    chunk[:, :, 20:30], chunk[:, :, 30:40] = torch.finfo(dtype).max, torch.finfo(dtype).min
    assert bool(codec.decode(codec.encode(chunk, 0)).isfinite().all())


def test_chunks_that_it_refuses(model, artifact):
    codec, chunk = of_artifact(artifact), chunk_of(model, 5)
    for wrong in (chunk[:, :1], chunk[0], chunk[..., :32], chunk[:, :, :0], torch.cat([chunk, chunk])):
        with pytest.raises(ValueError, match=r"the chunk has shape \(.*\), expected \[2, 2, tokens, 64\]"):
            codec.encode(wrong, 0)
    with pytest.raises(ValueError, match="the chunk is a ndarray, expected a tensor"):
        codec.encode(chunk.float().numpy(), 0)
    with pytest.raises(ValueError, match=r"the chunk is torch\.float64, expected float32, float16 or bfloat16"):
        codec.encode(chunk.double(), 0)
    for start in (-1, True, 1.0, 2**30):
        with pytest.raises(ValueError, match="start must be a"):
            codec.encode(chunk, start)
    for bad in (float("nan"), float("inf")):
        spoilt = chunk.clone()
        spoilt[1, 1, 4, 63] = bad
        with pytest.raises(ValueError, match="the chunk has NaN or infinite entries"):
            codec.encode(spoilt, 0)
    blob = codec.encode(chunk, 0)
    for out in (torch.empty_like(chunk[:, :, :4]), chunk.half()):
        with pytest.raises(ValueError, match=r"out is .*, expected \(2, 2, 5, 64\) torch\.float32"):
            codec.decode(blob, out=out)
    for tokens in (0, -1, 2.0):
        with pytest.raises(ValueError, match="tokens must be a whole number of tokens, at least 1"):
            codec.size(tokens)
    with pytest.raises(ValueError, match="start must be a position"):
        codec.size(4, -1)
