"""Prefixes saved with `storage_bits`: keys and values are as the codec decodes them, encoded by the cache that loads them."""

import copy
import json
import struct
from functools import cache

import pytest
import torch
from cases import BY_NAME, CASES, calibrated_artifact
from damaged_blobs import resealed
from joint_chunks import with_storage
from layer_walk import Tokens, differing, feed, stored
from one_line import message
from saved_prefixes import File
from stored_chunks import HEADER
from tolerances import FLOAT32_ATTENTION
from toy_models import NEW, left_padded, random_model
from transformers import DynamicCache

from calib.runtime import Artifact, Codec, compress
from calib.runtime.logits import Logits
from calib.runtime.prefix.prefix import PrefixError
from calib.runtime.rotation import Rotation

BITS, SIZES, COLUMNS = 2.5, [170, 61, 99], 180
# The toy artifact has no clip factors for their groups, and `kivi` uses the factors of any artifact that it is given.
UNFITTED = {"kivi-2-fine", "kivi-4-keys-2-values"}
# Cases whose stores need queries, by their plan or because queries measure a transform.
BY_QUERIES = [case for case in CASES if case.observes or case.name == "mikv-calibrated"]
TAKING = [case for case in CASES if case not in BY_QUERIES and case.name not in UNFITTED]
KEEPING = [case for case in TAKING if not case.plan.evicts]


@pytest.fixture(scope="module")
def model():
    return random_model("llama")


@pytest.fixture(scope="module")
def artifact(model):
    return artifact_of(model)


@cache
def artifact_of(model):
    return calibrated_artifact(model)


def opened(case, model, **asked):
    return compress(model, case.method, **{"artifact": artifact_of(model), **case.options, **asked})


def rows_of(model, sizes=SIZES, seed=1):
    return [Tokens.random(model, size, seed + row) for row, size in enumerate(sizes)]


def chunk_of(tokens):
    """`[2, layers, tokens, kv_heads * D]`, as the codec takes it."""
    return torch.stack([tokens.keys, tokens.values]).transpose(2, 3).flatten(3)


def tokens_of(model, chunk, seed=0):
    """Tokens with random queries, and the keys and values of `chunk [2, layers, tokens, kv_heads * D]`."""
    keys, values = chunk.unflatten(-1, (model.config.num_key_value_heads, -1)).transpose(2, 3)
    return Tokens(Tokens.random(model, chunk.shape[2], seed).queries, keys, values)


def read_back(cache, row):
    held = [layer.store.read_back(row) for layer in cache.compressed]
    return torch.stack([torch.stack(part) for part in zip(*held, strict=True)]).transpose(2, 3).flatten(3)


@pytest.fixture(scope="module")
def saved(model, tmp_path_factory):
    """A file of three ragged rows of an exact cache."""
    path = tmp_path_factory.mktemp("p") / "prefix.safetensors"
    with opened(BY_NAME["full"], model) as cache:
        feed(cache, rows_of(model), columns=COLUMNS)
        cache.save(path, storage_bits=BITS)
    return path


# ---- whole


@pytest.mark.arithmetic
@pytest.mark.parametrize("case", TAKING, ids=str)
def test_what_is_loaded_is_what_the_codec_has_in_the_methods_own_encoding(model, artifact, saved, case):
    """Bit for bit as after a prefill of the decoded keys and values; both caches then continue alike."""
    codec = Codec.from_artifact(artifact, bits=BITS)
    decoded = [tokens_of(model, codec.decode(codec.encode(chunk_of(row), 0))) for row in rows_of(model)]
    with opened(case, model, prefix=saved) as found, opened(case, model) as wanted:
        feed(wanted, decoded, columns=COLUMNS)
        assert found.get_seq_length() == wanted.get_seq_length() == COLUMNS
        assert found.sequences.lengths == SIZES
        for sizes in ([], [1, 1, 1], [50, 3, 40]):
            if sizes:
                outputs = [feed(cache, rows_of(model, sizes, seed=20)) for cache in (found, wanted)]
                pairs = [pair for layer in zip(*outputs, strict=True) for pair in zip(*layer, strict=True)]
                assert all(torch.equal(*pair) for pair in pairs)
            assert not any(differing(stored(found, row), stored(wanted, row), mass=0) for row in range(3))
        assert found.memory() == wanted.memory()


@pytest.mark.arithmetic
@pytest.mark.parametrize("case", KEEPING, ids=str)
def test_a_cache_is_saved_as_it_decodes(model, artifact, case, tmp_path):
    """`read_back` gives the keys and values that attention uses, and the codec encodes; also after decode steps and a later turn,
    whose blocks may lie in tiers of their own."""
    path, codec = tmp_path / "prefix.safetensors", Codec.from_artifact(artifact, bits=BITS)
    with opened(case, model) as cache:
        fed = rows_of(model)
        feed(cache, fed, columns=COLUMNS)
        for step, sizes in enumerate([*[[1, 1, 1]] * 5, [50, 3, 40]]):
            new = rows_of(model, sizes, seed=30 + 3 * step)
            fed = [Tokens(*(torch.cat(pair, 2) for pair in parts(*both))) for both in zip(fed, new, strict=True)]
            feed(cache, new)
        cache.save(path, storage_bits=BITS)
        chunks = [read_back(cache, row) for row in range(3)]
        exact = case.on_host or case.method == "full"
        assert not exact or all(torch.equal(chunk, chunk_of(row)) for chunk, row in zip(chunks, fed, strict=True))
        if not case.on_host:  # offloading attends to exact pairs instead of the device's copy
            asked = rows_of(model, [1, 1, 1], seed=70)
            for layer, outputs in enumerate(feed(cache, asked)):
                for row, output in enumerate(outputs):
                    own = tokens_of(model, chunks[row])
                    wanted = attended(own, asked[row], layer)
                    assert float((output - wanted).abs().max()) < FLOAT32_ATTENTION * float(
                        own.values[layer].abs().max()
                    )
    with opened(BY_NAME["full"], model, prefix=path) as found:
        for row, chunk in enumerate(chunks):
            assert torch.equal(read_back(found, row), codec.decode(codec.encode(chunk, 0)))


def parts(*tokens):
    return zip(*((one.queries, one.keys, one.values) for one in tokens), strict=True)


def attended(held, new, layer):
    """Attention of one new token over the held ones and itself, computed in float64: `[heads, 1, D]` float32."""
    keys, values = (
        torch.cat([getattr(one, name)[layer] for one in (held, new)], 1).double() for name in ("keys", "values")
    )
    query = new.queries[layer].double().unflatten(0, (len(keys), -1))[:, :, 0]
    weights = (query @ keys.mT * Logits(query.shape[-1] ** -0.5).scale).softmax(-1)
    return (weights @ values).flatten(0, 1)[:, None].float()


@pytest.mark.arithmetic
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_in_16_bits(dtype, tmp_path):
    """Chunks use the model's own RoPE, whose frequencies were rounded when the model was cast."""
    model, path = random_model("llama", dtype), tmp_path / "prefix.safetensors"
    codec = Codec.from_artifact(artifact_of(model), bits=BITS, rotation=Rotation.of(model, ""))
    with opened(BY_NAME["full"], model) as cache:
        feed(cache, rows_of(model, [70]))
        cache.save(path, storage_bits=BITS)
        wanted = codec.decode(codec.encode(chunk_of(rows_of(model, [70])[0]), 0))
    with opened(BY_NAME["full"], model, prefix=path) as found:
        assert read_back(found, 0).dtype == dtype and torch.equal(read_back(found, 0), wanted)


def test_in_the_profile_storage(model, artifact, tmp_path):
    """With an artifact of `calib fit --model.storage true` stored chunks have the profile `storage`."""
    path, joint = tmp_path / "prefix.safetensors", with_storage(artifact)
    codec = Codec.from_artifact(joint, bits=BITS)
    assert codec.profile == "storage"
    with opened(BY_NAME["full"], model, artifact=joint) as cache:
        feed(cache, rows_of(model, [70]))
        cache.save(path, storage_bits=BITS)
    with opened(BY_NAME["full"], model, artifact=joint, prefix=path) as found:
        assert torch.equal(read_back(found, 0), codec.decode(codec.encode(chunk_of(rows_of(model, [70])[0]), 0)))
    with pytest.raises(PrefixError, match=r"storage\.basis' is not in this artifact") as error:
        opened(BY_NAME["full"], model, prefix=path)
    message(error)


def test_generation_goes_on_as_from_these_keys_and_values(model, tmp_path):
    """The tokens are those of a DynamicCache that is given the codec's keys and values, in left-padded rows."""
    path, inputs = tmp_path / "prefix.safetensors", left_padded([90, 60])
    case, codec = BY_NAME["full"], Codec.from_artifact(artifact_of(model), bits=BITS)
    with opened(case, model) as cache, torch.no_grad():
        positions = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
        model(**inputs, position_ids=positions, past_key_values=cache)
        cache.save(path, input_ids=inputs["input_ids"], storage_bits=BITS)
        chunks = [codec.decode(codec.encode(read_back(cache, row), 0)) for row in range(2)]
    theirs = DynamicCache(config=model.config)
    for layer in range(2):
        rows = [chunk[:, layer].unflatten(-1, (2, 32)).transpose(1, 2) for chunk in chunks]
        keys, values = torch.stack([torch.nn.functional.pad(row, (0, 0, 90 - row.shape[2], 0)) for row in rows], 1)
        theirs.update(keys, values, layer)
    question = left_padded([6, 6], seed=3)["input_ids"]
    mask = torch.cat([inputs["attention_mask"], torch.ones(2, 6, dtype=torch.long)], 1)
    with opened(case, model, prefix=path) as ours:
        assert torch.equal(ours.input_ids, inputs["input_ids"])
        turn = {"input_ids": torch.cat([ours.input_ids, question], 1), "attention_mask": mask, "max_new_tokens": NEW}
        copied = copy.deepcopy(ours)
        assert copied.origin.artifact is ours.origin.artifact  # shared, not copied
        found = [model.generate(**turn, past_key_values=one, do_sample=False) for one in (ours, copied)]
    wanted = model.generate(**turn, past_key_values=theirs, do_sample=False)
    assert torch.equal(found[0], wanted) and torch.equal(found[1], wanted)


@pytest.mark.arithmetic
@pytest.mark.parametrize("bits", [1, 2.5])
def test_the_file_is_as_large_as_the_codec_says(model, artifact, bits, tmp_path):
    path, codec = tmp_path / "prefix.safetensors", Codec.from_artifact(artifact, bits=bits)
    with opened(BY_NAME["kivi-2-clipped"], model) as cache:
        feed(cache, rows_of(model, [3000, 200]))
        cache.save(path, storage_bits=bits)
        exact = cache.memory().dynamic_bytes
    data = path.read_bytes()
    header = 8 + int.from_bytes(data[:8], "little")
    assert len(data) == header + sum(codec.size(size, 0, torch.float32) for size in (3000, 200))
    assert len(data) < exact / 32 * bits * 1.05 + 8000  # the header of this model, and the exact first tokens


def test_a_model_that_slides_throughout_within_its_window(tmp_path):
    model, path = random_model("mistral-sliding"), tmp_path / "prefix.safetensors"
    for name in ("kivi-2-short", "klt-short"):
        with opened(BY_NAME[name], model) as cache, torch.no_grad():
            model(**left_padded([47, 20]), past_key_values=cache)
            cache.save(path, storage_bits=4)
            wanted = [read_back(cache, row) for row in range(2)]
        codec = Codec.from_artifact(artifact_of(model), bits=4)
        with opened(BY_NAME["full"], model, prefix=path) as found:
            for row, chunk in enumerate(wanted):
                assert torch.equal(read_back(found, row), codec.decode(codec.encode(chunk, 0)))
        with opened(BY_NAME[name], model) as cache, torch.no_grad():
            model(**left_padded([48, 20]), past_key_values=cache)
            with pytest.raises(
                PrefixError, match="those before the sliding window of 48 are not kept; leave storage_bits out"
            ):
                cache.save(path, storage_bits=4)


# ---- refused


@pytest.mark.arithmetic
@pytest.mark.parametrize("case", BY_QUERIES, ids=str)
def test_methods_that_decide_by_queries_are_refused_both_ways(model, saved, case, tmp_path):
    words = f"{case.method} chooses by queries what it stores, and a file of storage_bits has no queries"
    with opened(case, model) as cache:
        feed(cache, rows_of(model, [40]))
        with pytest.raises(PrefixError) as error:
            cache.save(tmp_path / "p", storage_bits=2)
        assert f"{words}; leave storage_bits out" in message(error)
    with pytest.raises(PrefixError) as error:
        opened(case, model, prefix=saved)
    assert f"{words}; load it by another method" in message(error)
    assert not list(tmp_path.iterdir())


def without_klt(artifact):
    tensors = {name: tensor for name, tensor in artifact.tensors.items() if "klt" not in name}
    return Artifact(tensors, artifact.fingerprint, artifact.provenance, artifact.clip_bits)


def other_means(artifact):
    name = "values.klt.mean"
    return Artifact(
        {**artifact.tensors, name: artifact.tensors[name] + 1e-3},
        artifact.fingerprint,
        artifact.provenance,
        artifact.clip_bits,
    )


@pytest.mark.arithmetic
def test_what_cannot_be_saved_is_refused_in_a_line(model, artifact, tmp_path):
    path = tmp_path / "p"
    for case, asked, bits, words in (
        ("full", {"artifact": None}, 2, "need an artifact; pass artifact=Artifact.load"),
        ("full", {"artifact": without_klt(artifact)}, 2, "no statistics of keys before RoPE"),
        ("full", {}, 0.01, "bits must be a number from"),
        ("full", {}, 9, "bits must be a number from"),
        ("full", {}, float("nan"), "bits must be a number above 0"),
        ("full", {}, "2", "bits must be a number above 0"),
        ("full", {}, True, "bits must be a number above 0"),
        ("streaming_llm", {}, 2, "streaming_llm drops tokens"),
        ("oracle", {}, 2, "oracle drops tokens"),
    ):
        with opened(BY_NAME[case], model, **asked) as cache:
            with pytest.raises(PrefixError, match="holds no tokens"):
                cache.save(path, storage_bits=bits)
            feed(cache, rows_of(model, [40, 30]))
            with pytest.raises(PrefixError) as error:
                cache.save(path, storage_bits=bits)
            assert words in message(error) and message(error).startswith(f"{path}: cannot be saved: ")
    mixed = random_model("qwen3-mixed")
    with opened(BY_NAME["full"], mixed) as cache, torch.no_grad():
        mixed(left_padded([30])["input_ids"], past_key_values=cache)
        with pytest.raises(PrefixError) as error:
            cache.save(path, storage_bits=2)
        assert "1 of 2 layers are compressed" in message(error)
    assert not path.exists()


@pytest.mark.arithmetic
def test_another_model_artifact_or_dtype_is_refused(model, artifact, saved):
    half, case = random_model("llama", torch.bfloat16), BY_NAME["full"]
    other = random_model("llama")
    other.model.layers[0].self_attn.k_proj.weight.data[0, 0] += 1
    for own, asked, words in (
        (model, {"artifact": None}, "need an artifact"),
        (model, {"artifact": without_klt(artifact)}, "no statistics of keys before RoPE"),
        (model, {"artifact": other_means(artifact)}, "the numbers that klt takes from the artifact differ"),
        (half, {}, "dtype float32, and bfloat16 is asked for"),
        (other, {}, "weights are not those"),
    ):
        before = own.config._attn_implementation
        with pytest.raises(PrefixError) as error:
            opened(case, own, prefix=saved, **asked)
        assert words in message(error) and message(error).startswith(str(saved))
        assert own.config._attn_implementation == before  # nothing is left attached


def numbers(**changes):
    def change(file):
        file.document["numbers"] |= changes

    return change


def chunks(change):
    def changed(file):
        change(file.tensors)

    return changed


def flipped(tensors):
    tensors["chunks/1"][200] ^= 1


def swapped(tensors):
    tensors["chunks/0"], tensors["chunks/1"] = tensors["chunks/1"], tensors["chunks/0"]


@pytest.mark.arithmetic
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (chunks(flipped), "its checksum differs"),
        (chunks(swapped), "the chunk of row 0 has 61 float32 tokens from 0, expected 170 float32 tokens from 0"),
        (chunks(lambda found: found.pop("chunks/2")), "2 chunks for rows of [170, 61, 99] tokens"),
        (chunks(lambda found: found.update({"chunks/3": found["chunks/2"]})), "4 chunks for rows"),
        (chunks(lambda found: found.update({"chunks/0": found["chunks/0"][:100]})), "100 bytes"),
        (chunks(lambda found: found.update({"chunks/0": found["chunks/0"][:-1]})), "bytes, expected"),
        (chunks(lambda found: found.update({"chunks/0": torch.zeros(300)})), "expected torch.uint8 ['any']"),
        (chunks(lambda found: found["chunks/0"][48:56].fill_(255)), "bits must be a number above 0, got nan"),
        (chunks(lambda found: found["chunks/0"][36:40].fill_(255)), "the chunk of row 0 has 4294967295"),
        (numbers(**{"rows/lengths": []}), "3 chunks for rows of [] tokens"),
        (numbers(**{"rows/lengths": [170, 61, 0]}), "expected whole numbers from 1"),
        (numbers(**{"rows/lengths": [170, 61, 98]}), "the chunk of row 2 has 99"),
        (numbers(seen=169), "'seen' is 169"),
        (numbers(seen=2**40), "'seen' is"),
        (lambda file: file.document.update(stages="x"), "the numbers that klt takes"),
        (lambda file: file.document["made"].pop("storage_bits"), "method None"),
    ],
)
def test_a_file_that_was_changed_is_refused(model, saved, tmp_path, change, words):
    """The file's checksums match its changed contents."""
    file, path = File.of(saved.read_bytes()), tmp_path / "p"
    change(file)
    path.write_bytes(file.data())
    with pytest.raises(PrefixError) as error:
        opened(BY_NAME["kivi-2-clipped"], model, prefix=path)
    assert words in message(error)


@pytest.mark.arithmetic
def test_exact_tokens_that_attention_has_no_room_for_are_refused(model, saved, tmp_path):
    """They are finite, and all checksums match; such tokens are not saved either."""
    file, path = File.of(saved.read_bytes()), tmp_path / "p"
    blob = bytearray(file.tensors["chunks/1"].numpy().tobytes())
    struct.pack_into("<f", blob, HEADER, 3e38)
    file.tensors["chunks/1"] = torch.frombuffer(bytearray(resealed(bytes(blob))), dtype=torch.uint8)
    path.write_bytes(file.data())
    with pytest.raises(PrefixError, match=r"'chunks/1' has values from .* expected finite ones of 4.295e.09 at most"):
        opened(BY_NAME["full"], model, prefix=path)
    with opened(BY_NAME["full"], model) as cache:
        feed(cache, [Tokens.random(model, 40, seed=1, magnitude=1e12)])
        with pytest.raises(PrefixError, match="cannot be saved: 'chunks/0' has values"):
            cache.save(path, storage_bits=2)


@pytest.mark.arithmetic
def test_a_damaged_file_is_refused(model, saved, tmp_path):
    data, path = saved.read_bytes(), tmp_path / "p"
    for at in (9, 200, len(data) // 2, len(data) - 9):
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        with pytest.raises(PrefixError) as error:
            opened(BY_NAME["kivi-2-clipped"], model, prefix=path)
        message(error)
    assert json.loads(json.dumps(File.of(data).document["made"])) == {"dtype": "float32", "storage_bits": BITS}
