"""Saved prefixes: a loaded cache equals the saved one, bit for bit, and continues alike; other files are refused."""

import json
import os
import shutil
from dataclasses import replace

import pytest
import safetensors.torch
import torch
from cases import BY_NAME, CASES, calibrated_artifact
from layer_walk import Tokens, differing, feed, stored
from one_line import message
from safetensors import safe_open
from toy_models import SLIDING, left_padded, random_model

from calib.runtime import PrefixError, compress
from calib.runtime.artifact.artifact import Artifact
from calib.runtime.files import canonical_json
from calib.runtime.files.state import flat
from calib.runtime.files.tensor_bytes import tensor_bytes
from calib.runtime.prefix.file import KEY, crc32

STEPS = 9  # tokens after the prompt before a cache is saved
DISK = 0.02  # of the measured bytes: the header with names and page numbers


@pytest.fixture(scope="module")
def model():
    return random_model("llama")


def read(case, model, path, **changes):
    """Opens a cache of `case` with the prefix saved at `path`; `changes` are other options."""
    artifact = calibrated_artifact(model) if case.artifact else None
    asked = {"method": case.method, "artifact": artifact, "seed": 0, **case.options, **changes}
    return compress(model, prefix=path, **asked)


def same(one, other) -> bool:
    """Whether two caches hold the same bits and numbers."""
    (bits, numbers), (others, other_numbers) = (flat(cache.state()) for cache in (one, other))
    return (
        numbers == other_numbers
        and bits.keys() == others.keys()
        and all(part.dtype == others[name].dtype and torch.equal(part, others[name]) for name, part in bits.items())
    )


def ragged(model, sizes: list[int], seed: int) -> list[Tokens]:
    return [Tokens.random(model, size, seed + row) for row, size in enumerate(sizes)]


# ---- whole


@pytest.mark.arithmetic
@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_is_read_is_what_was_saved_and_goes_on_as_it_would_have(model, case, tmp_path):
    path = tmp_path / "prefix.safetensors"
    with case.open(model) as cache:
        feed(cache, ragged(model, [170, 61, 99], seed=1), columns=180)
        for step in range(STEPS):
            feed(cache, ragged(model, [1, 1, 1], seed=10 + 3 * step))
        cache.batch_select_indices(torch.tensor([0, 1, 1]))  # pages that two rows share, and free ones
        cache.save(path)
        with read(case, model, path) as again:
            assert same(cache, again)
            assert again.get_seq_length() == cache.get_seq_length() == 180 + STEPS
            # Lengths, capacities and widths are enough to predict its bytes.
            assert again.memory().predicted_bytes == pytest.approx(again.memory().measured_bytes, rel=0.01)
            for sizes, seed in ([1, 1, 1], 40), ([50, 33, 40], 50), ([1, 1, 1], 60):
                outputs = [feed(one, ragged(model, sizes, seed)) for one in (cache, again)]
                assert all(
                    torch.equal(*pair) for layer in zip(*outputs, strict=True) for pair in zip(*layer, strict=True)
                )
            # Page numbers may differ: the order in which free pages are taken does not matter.
            assert not any(differing(stored(again, row), stored(cache, row), mass=0) for row in range(3))
            assert again.memory() == cache.memory()


@pytest.mark.arithmetic
@pytest.mark.parametrize("name", ["rtn-4", "zipcache-short", "mikv-16-2", "gear", "csr-short"])
def test_parameters_beyond_16_bits_come_back_as_wide_as_they_were(model, name, tmp_path):
    path, case = tmp_path / "prefix.safetensors", BY_NAME[name]
    with case.open(model) as cache:
        feed(cache, [Tokens.random(model, 150, seed=1, magnitude=1e6)])
        cache.save(path)
        with read(case, model, path) as again:
            assert same(cache, again)
            for one in (cache, again):
                feed(one, [Tokens.random(model, 60, seed=2, magnitude=1e6)])
            assert same(cache, again)


@pytest.mark.full
@pytest.mark.parametrize(
    "case",
    [
        "kivi-2-short",
        "zipcache-short",
        "mikv-16-2",
        "mikv-fastgen",
        "mikv-normalised",
        "mikv-channel",
        "csr-short",
        "gear",
        "specache",
        "infllm",
    ],
)
@pytest.mark.parametrize("family", ["llama", "qwen3-mixed", "mistral-sliding"])
def test_generation_goes_on(family, case, tmp_path):
    model, inputs, path = random_model(family), left_padded([90, 60]), tmp_path / "prefix.safetensors"
    with BY_NAME[case].open(model) as cache:
        first = model.generate(**inputs, past_key_values=cache, max_new_tokens=4, do_sample=False)
        cache.save(path, input_ids=first[:, :-1])  # the last one has not been through the model
        with read(BY_NAME[case], model, path) as again:
            mask = torch.cat([inputs["attention_mask"], torch.ones(2, 4, dtype=torch.long)], 1)
            assert torch.equal(again.input_ids, first[:, :-1])
            turn = {"input_ids": first, "attention_mask": mask, "max_new_tokens": 40, "do_sample": False}
            expected, found = (model.generate(**turn, past_key_values=one) for one in (cache, again))
            assert torch.equal(expected, found) and same(cache, again)


def test_a_turn_behind_prompt_lookup_is_saved(tmp_path):
    """transformers leaves past recording on, and its sliding layers then keep more than their window."""
    model, path, case = random_model("qwen3-mixed"), tmp_path / "prefix.safetensors", BY_NAME["kivi-2-short"]
    with case.open(model) as cache, torch.no_grad():
        cache.activate_past_recording()
        model(**left_padded([90]), past_key_values=cache)
        cache.crop(0)
        model(left_padded([5])["input_ids"], past_key_values=cache)
        (sliding,) = (layer for layer in cache.layers if layer not in cache.compressed)
        assert sliding.keys.shape[2] == SLIDING - 1 + 5
        cache.save(path)
        with read(case, model, path) as again:
            logits = [model(torch.tensor([[7]]), past_key_values=one).logits for one in (cache, again)]
            torch.testing.assert_close(*logits)


def test_one_kv_head_with_calibrated_thresholds(tmp_path):
    """A threshold then has a single element, whose bytes must be right whatever its stride."""
    model = random_model("mistral")
    with BY_NAME["mikv-corrected"].open(model) as cache, torch.no_grad():
        model(**left_padded([30]), past_key_values=cache)
        cache.save(tmp_path / "prefix")
    assert bytes(tensor_bytes(torch.arange(6.0)[3:].as_strided((1,), (3,)))) == bytes(tensor_bytes(torch.tensor([3.0])))


def test_one_prefix_serves_questions_of_any_length(model, tmp_path):
    path, case = tmp_path / "prefix.safetensors", BY_NAME["kivi-2-short"]
    prompt = left_padded([300])["input_ids"]
    questions = [left_padded([size], seed=size)["input_ids"] for size in (5, 17, 9)]
    with case.open(model) as cache, torch.no_grad():
        model(input_ids=prompt, past_key_values=cache)
        cache.save(path, input_ids=prompt)
    alone = []
    for question in questions:
        with read(case, model, path) as cache:
            asked = torch.cat([cache.input_ids, question], 1)
            alone.append(
                model.generate(input_ids=asked, past_key_values=cache, max_new_tokens=8, do_sample=False)[0, -8:]
            )
    with read(case, model, path) as cache:
        cache.batch_repeat_interleave(3)
        shared = cache.memory().by_kind["codes"]
        padded = [torch.nn.functional.pad(question, (17 - question.shape[1], 0)) for question in questions]
        asked = torch.cat([cache.input_ids, torch.cat(padded)], 1)
        real = torch.tensor([[0] * (17 - q.shape[1]) + [1] * q.shape[1] for q in questions])
        mask = torch.cat([torch.ones_like(cache.input_ids), real], 1)
        found = model.generate(
            input_ids=asked, attention_mask=mask, past_key_values=cache, max_new_tokens=8, do_sample=False
        )
        assert torch.equal(found[:, -8:], torch.stack(alone))
    with read(case, model, path) as cache:
        assert cache.memory().by_kind["codes"] == shared  # three rows, one prompt's pages


@pytest.mark.full
@pytest.mark.arithmetic
@pytest.mark.parametrize(
    "name", ["full", "kivi-2", "zipcache", "mikv-8-2", "csr-offline", "gear", "specache", "offload"]
)
def test_the_file_is_as_large_as_the_memory(model, name, tmp_path):
    path, case = tmp_path / "prefix.safetensors", BY_NAME[name]
    with case.open(model) as cache:
        feed(cache, ragged(model, [6000], seed=3))
        cache.save(path)
        memory = cache.memory()
    # The artifact's tables are not in the file.
    held = memory.measured_bytes + memory.host_bytes - sum(t.nbytes for t in tables_of(cache))
    assert path.stat().st_size == pytest.approx(held, rel=DISK)


def tables_of(cache) -> list[torch.Tensor]:
    return list({id(table): table for layer in cache.compressed for table in layer.plan.tables()}.values())


def test_a_file_of_before_an_option_has_its_default(model, tmp_path):
    """An option that an older file does not record has its default, the only value that there was."""
    path, tokens = tmp_path / "prefix.safetensors", ragged(model, [40], seed=1)
    with compress(model, method="rtn") as cache:
        feed(cache, tokens)
        older = {name: value for name, value in cache.origin.options.items() if name not in ("basis", "key_bias")}
        cache.origin = replace(cache.origin, options=older)
        cache.save(path)
        with compress(model, method="rtn", prefix=path) as found:
            assert same(found, cache)
    with pytest.raises(PrefixError, match='options basis = "none", and basis = "hadamard" is asked for'):
        compress(model, method="rtn", prefix=path, basis="hadamard")
    with pytest.raises(PrefixError, match="options bits = 4, and bits = 3 is asked for"):
        compress(model, method="rtn", prefix=path, bits=3)


def test_drafts_are_confirmed(model, tmp_path):
    path, case = tmp_path / "prefix.safetensors", BY_NAME["kivi-2-short"]
    with case.open(model) as cache:
        cache.activate_past_recording()
        feed(cache, ragged(model, [70], seed=5))
        cache.save(path)
        with read(case, model, path) as again:
            assert again.sequences.lengths == [70] and not again.sequences.recording


def test_ids_follow_their_rows(model, tmp_path):
    path, case, ids = tmp_path / "prefix.safetensors", BY_NAME["rtn-4"], torch.arange(20).view(2, 10)
    with case.open(model) as cache:
        feed(cache, ragged(model, [10, 10], seed=6))
        cache.save(path, input_ids=ids.int())
    with read(case, model, path) as cache:
        assert torch.equal(cache.input_ids, ids)
        cache.reorder_cache(torch.tensor([1, 1, 0]))
        assert torch.equal(cache.input_ids, ids[[1, 1, 0]])
        cache.reset()
        assert cache.input_ids is None


# ---- refused


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A file of `kivi` with an artifact, its model and its case."""
    model, case, path = (
        random_model("llama"),
        BY_NAME["kivi-2-calibrated"],
        tmp_path_factory.mktemp("p") / "prefix.safetensors",
    )
    with case.open(model) as cache:
        feed(cache, ragged(model, [150, 40], seed=1))
        cache.save(path)
    return model, case, path


def other_artifact(model) -> Artifact:
    artifact = calibrated_artifact(model)
    tensors = {name: tensor * 1.5 if name == "keys.high" else tensor for name, tensor in artifact.tensors.items()}
    return Artifact(tensors, artifact.fingerprint, artifact.provenance, artifact.clip_bits)


def half(model):
    """The same model in another dtype."""
    return random_model("llama", torch.bfloat16)


def other_weights(model):
    other = random_model("llama")
    other.model.layers[0].self_attn.k_proj.weight.data[0, 0] += 1
    return other


def larger(model):
    return random_model("llama", num_hidden_layers=3)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"method": "rtn", "residual": None}, "method kivi, and rtn is asked for"),
        ({"bits": 4}, "options bits = 2, and bits = 4 is asked for"),
        ({"seed": 1}, "seed 0, and 1 is asked for"),
        ({"artifact": other_artifact}, "the numbers that the method takes from its artifact differ"),
        (
            {"model": larger, "artifact": calibrated_artifact},
            "layers differs: this model has 3, the prefix was made with 2",
        ),
        ({"model": other_weights, "artifact": calibrated_artifact}, "weights are not those"),
        ({"model": half, "artifact": calibrated_artifact}, "dtype float32, and bfloat16 is asked for"),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value[:20],
)
def test_another_model_method_or_artifact_is_refused(saved, changes, told):
    model, case, path = saved
    changes = dict(changes)
    model = changes.pop("model", lambda same: same)(model)
    asked = {"method": case.method, "artifact": calibrated_artifact, **case.options, **changes}
    artifact = asked.pop("artifact")(model)
    before = model.config._attn_implementation
    with pytest.raises(PrefixError) as caught:
        compress(model, artifact=artifact, prefix=path, **{name: x for name, x in asked.items() if x is not None})
    assert told in message(caught) and str(path) in str(caught.value)
    assert model.config._attn_implementation == before  # nothing is left attached


def forged(path, target, numbers=None, tensors=None):
    """Writes a copy with other numbers and tensors, and checksums that match them."""
    with safe_open(path, "pt") as file:
        document = json.loads(file.metadata()[KEY])
        stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    document["numbers"] |= numbers or {}
    stored |= tensors or {}
    document["crc32"] = crc32(stored)
    del document["sha256"]
    document["sha256"] = canonical_json.sha256(document)
    safetensors.torch.save_file(stored, target, {KEY: canonical_json.dumps(document)})


@pytest.mark.parametrize(
    ("numbers", "tensors", "told"),
    [
        ({"rows/tables/0/rows": [[0, 99], [2]]}, {}, "page numbers beyond the"),
        ({"rows/tables/0/rows": [[0, 1]]}, {}, "pages of 1 rows, expected 2"),
        ({"rows/tables/0/rows": [[0, "1"], [2]]}, {}, "expected whole numbers from -1 on"),
        ({"rows/lengths": [150, -40]}, {}, "expected whole numbers from 0 on"),
        ({"rows/tables/0/capacity": 1}, {}, "page numbers beyond the capacity of 1 pages"),
        ({"layers/0/dtype": "system"}, {}, "'system' is no floating dtype"),
        ({"layers/1/seen": None}, {}, "'seen' is absent, expected int"),
        (
            {},
            {"layers/0/store/keys/window/tokens": torch.zeros(2, 2, 999, 32)},
            "[2, 2, 999, 32], expected torch.float32 [2, 2, 32, 32]",
        ),
        (
            {},
            {"layers/0/store/keys/window/tokens": torch.zeros(3, 2, 32, 32)},
            "[3, 2, 32, 32], expected torch.float32 [2, 2, 32, 32]",
        ),
        (
            {},
            {"layers/0/store/keys/pages/more": torch.zeros(3)},
            "pages have the fields ['more', 'words'], expected ['words']",
        ),
        ({}, {"layers/0/store/keys/pages/words": torch.zeros(3, dtype=torch.int16)}, "expected torch.int16"),
    ],
)
def test_a_file_that_was_made_up_is_refused(saved, tmp_path, numbers, tensors, told):
    model, case, path = saved
    forged(path, tmp_path / "forged.safetensors", numbers, tensors)
    with pytest.raises(PrefixError) as caught:
        read(case, model, tmp_path / "forged.safetensors")
    assert told in message(caught)


def truncated(data: bytes) -> bytes:
    return data[:-100]


def one_bit(data: bytes) -> bytes:
    return data[:-9] + bytes([data[-9] ^ 1]) + data[-8:]


def other_numbers(data: bytes) -> bytes:
    return data.replace(rb"\"seed\":0", rb"\"seed\":1")


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (truncated, ""),
        (one_bit, "its tensors were changed"),
        (other_numbers, "its metadata was changed"),
        (lambda data: b"", ""),
    ],
)
def test_a_damaged_file_is_refused(saved, tmp_path, damage, told):
    model, case, path = saved
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(damage(path.read_bytes()))
    assert broken.read_bytes() != path.read_bytes()
    with pytest.raises(PrefixError) as caught:
        read(case, model, broken)
    assert told in message(caught) and str(broken) in str(caught.value)


def test_what_is_no_prefix_is_refused(saved, tmp_path):
    model, case, _ = saved
    calibrated_artifact(model).save(tmp_path / "a.calib.safetensors")
    for path, told in (
        (tmp_path / "a.calib.safetensors", "is no saved cache"),
        (tmp_path, "is a folder"),
        (tmp_path / "none.safetensors", "No such file"),
        (7, "is no path; name a file"),
    ):
        with pytest.raises(PrefixError, match=told) as caught:
            read(case, model, path)
        assert message(caught).startswith(str(path))


def test_what_cannot_be_saved_is_refused_and_an_old_file_stays(saved, tmp_path, monkeypatch):
    model, case, path = saved
    old = tmp_path / "old.safetensors"
    shutil.copy(path, old)
    cache = case.open(model)
    with pytest.raises(PrefixError, match="holds no tokens"):
        cache.save(old)
    feed(cache, ragged(model, [12], seed=2))
    for ids in (torch.zeros(1, 11, dtype=torch.long), torch.zeros(1, 12), [[0] * 12]):
        with pytest.raises(PrefixError, match="expected the 1 x 12 token ids"):
            cache.save(old, input_ids=ids)
    with pytest.raises(PrefixError, match="cannot be written"):
        cache.save(tmp_path / "old.safetensors" / "below")
    with pytest.raises(PrefixError, match="cannot be saved: is no path"):
        cache.save(None)

    def fails(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fails)
    with pytest.raises(PrefixError, match="No space left"):
        cache.save(old)
    monkeypatch.undo()
    assert old.read_bytes() == path.read_bytes() and sorted(tmp_path.iterdir()) == [old]
    cache.save(old)  # nothing was lost by the attempts
    cache.release()
    cache.save(old)  # nor by the release: the model is still there
    assert old.read_bytes() != path.read_bytes()
    (tmp_path / "any").write_bytes(b"")
    assert old.stat().st_mode == (tmp_path / "any").stat().st_mode


def test_a_name_that_safetensors_cannot_open_again_is_refused_both_ways(saved, tmp_path):
    model, case, path = saved
    other = tmp_path / os.fsdecode(b"\xff.safetensors")
    cache = read(case, model, path)
    with pytest.raises(PrefixError, match=r"not UTF-8.*otherwise"):
        cache.save(other)
    assert not list(tmp_path.iterdir())
    shutil.copy(path, other)
    with pytest.raises(PrefixError, match=r"not UTF-8.*otherwise"):
        read(case, model, other)


def test_the_model_must_be_there(tmp_path):
    other = random_model("qwen3")
    cache = BY_NAME["rtn-4"].open(other)
    feed(cache, ragged(other, [12], seed=2))
    del other
    with pytest.raises(PrefixError, match="the model of this cache was deleted"):
        cache.save(tmp_path / "prefix.safetensors")
