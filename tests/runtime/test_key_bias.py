"""`key_bias="folded"`, which subtracts the bias of key projections before encoding, against float64: what pages hold, attention,
and how much smaller errors are."""

import numpy as np
import oracle
import pytest
import torch
from cases import calibrated_artifact
from layer_walk import Tokens, differing, feed, stored
from step_tape import Tape
from tolerances import ATTENTION, FLOAT32_FOLD, LOGITS, ODD_CODES
from toy_models import biased_model, left_padded, random_model
from transformers import GPT2Config, GPT2LMHeadModel

from calib.evaluate.stored import stored as in_pages
from calib.runtime import compress
from calib.runtime.graphs import step_graphs
from calib.runtime.methods import Geometry, build
from calib.runtime.paging.pages import TILE_TOKENS
from calib.runtime.stages.codec import unserved
from calib.runtime.stages.hadamard import hadamard

METHODS = {
    "rtn": {"method": "rtn", "bits": 4},
    "rtn in another basis": {"method": "rtn", "bits": 4, "basis": "hadamard"},
    "kivi": {"method": "kivi", "bits": 2, "residual": 32},
    "specache": {"method": "specache", "bits": 2, "residual": 32, "k": 8},
}
MODELS = {
    "qwen2": biased_model,
    "half of the channels turn": lambda: biased_model(partial=True),
    "scaled": lambda: biased_model(
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 1024,
        }
    ),
}


@pytest.fixture(scope="module")
def model():
    return biased_model()


def opened(model, name: str, **more):
    return compress(model, **METHODS[name], key_bias="folded", **more)


def tokens_of(model, count: int, seed: int) -> Tokens:
    """Random tokens whose keys have the model's bias added, rotated to their positions in float64, as the model's keys have it."""
    found = Tokens.random(model, count, seed)
    with opened(model, "rtn") as cache:
        feed(cache, [found[:1]])
        streams = [layer.store.streams[0] for layer in cache.compressed]
    for layer, stream in enumerate(streams):
        found.keys[layer] += oracle.biases(stream, count).float()
    return found


def check_next(cache, rows: list[Tokens]) -> None:
    """Feeds one more forward; compares it with float64 attention over the tokens that the cache held before and the new ones."""
    before = oracle.contents(cache)
    outputs = feed(cache, rows)
    for layer, held in enumerate(before):
        for row, tokens in enumerate(rows):
            keys, values = (
                torch.cat([old, new[layer].double()], 1)
                for old, new in zip(held[row][:2], (tokens.keys, tokens.values), strict=True)
            )
            expected = oracle.attention(tokens.queries[layer], keys, values, 32**-0.5)
            worst = (outputs[layer][row].double() - expected).abs().max() / expected.abs().max()
            # Scores are as large as biases: a hundred times those that the tolerance is for.
            assert worst < 10 * ATTENTION[torch.float32], (layer, row, float(worst))


@pytest.mark.parametrize("kind", MODELS)
def test_the_bias_is_the_models(kind):
    """With zero key weights a key is the rotated bias alone, at any position, so that pages hold zeros."""
    model = MODELS[kind]()
    for layer in model.model.layers:
        layer.self_attn.k_proj.weight.data.zero_()
    ids = torch.randint(2, 100, (1, 40), generator=torch.Generator().manual_seed(0))
    with opened(model, "rtn") as cache, torch.no_grad():
        model(ids, past_key_values=cache)
        for layer in cache.compressed:
            keys = layer.store.streams[0]
            decoded = oracle.decoded_page(keys, layer.store.sequences.table.rows[0])
            assert float(decoded.transpose(0, 1).flatten(1, 2)[:, :40].abs().max()) < 1e-4
            held = oracle.held_tokens(layer, 0).keys
            found = in_pages(layer.store, 0)["keys"].tokens
            assert float(held.abs().max()) > 20 and float((held - found).abs().max()) < 1e-4


def test_one_bit_of_keys_without_their_bias_is_by_eq_3_whatever_the_artifact_has(model):
    """The artifact's clip factors were measured on keys with their bias: keys have SpeCache's 0.5, values have the artifact's."""
    plan = build("specache", {"bits": 1, "key_bias": "folded"}).plan(
        0, Geometry.of(model.config), calibrated_artifact(model)
    )
    assert plan.low.keys.codec.clip == 0.5 and isinstance(plan.low.values.codec.clip, torch.Tensor)


@pytest.mark.parametrize("name", ["rtn", "rtn in another basis"])
def test_what_is_stored_is_rounded_without_the_bias(model, name):
    """y = R (k_t - R_t b), with a scale and zero point per token, in float64: of a prompt, a chunk and single tokens. R is the
    basis, R_t RoPE at position t."""
    tokens = tokens_of(model, 90, seed=4)
    with opened(model, name) as cache:
        for start, stop in ((0, 60), (60, 80), *((n, n + 1) for n in range(80, 90))):
            feed(cache, [tokens[start:stop]])
        held = [oracle.held_tokens(layer, 0).keys for layer in cache.compressed]
        streams = [layer.store.streams[0] for layer in cache.compressed]
    draw = torch.Generator().manual_seed(0)
    turned = np.round((hadamard(32) * (torch.randint(2, (32,), generator=draw) * 2 - 1)).numpy() * 2**22) / 2**22
    turned = turned if name != "rtn" else np.eye(32)
    for layer, stream in enumerate(streams):
        bias = oracle.biases(stream, 90).numpy()
        y = (tokens.keys[layer].double().numpy() - bias) @ turned.T
        low, high = y.min(-1, keepdims=True), y.max(-1, keepdims=True)
        scale = ((high - low) / 15).astype(np.float16).astype(np.float64)
        zero = low.astype(np.float16).astype(np.float64)
        level = (y - zero) / scale + 0.5
        expected = (np.clip(np.floor(level), 0, 15) * scale + zero) @ turned + bias
        off = abs(held[layer].numpy() - expected).max(-1) > FLOAT32_FOLD * abs(bias).max()
        # A coordinate that float32 puts on the other side of a border, or whose scale float16 rounds otherwise: a key is as large
        # as its bias, and so are its roundings.
        assert off.mean() <= 20 * ODD_CODES * 32
        assert abs(level - np.round(level))[off].min(initial=0) < 1e-3


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("name", ["rtn", "rtn in another basis", "kivi"])
def test_attention_is_that_over_the_keys_with_their_bias(name, kind):
    """Equal rows and ragged ones, single tokens and chunks, a window that fills and KIVI's keys that are packed before values."""
    model = MODELS[kind]()
    for lengths in ((70, 70), (75, 40)):
        rows = [tokens_of(model, length + 45, seed=length) for length in lengths]
        cache = opened(model, name)
        cache.release()
        feed(cache, [row[:length] for row, length in zip(rows, lengths, strict=True)])
        for start, stop in ((0, 1), (1, 20), (20, 21), (21, 44), (44, 45)):
            check_next(cache, [row[length + start : length + stop] for row, length in zip(rows, lengths, strict=True)])


@pytest.mark.parametrize("speculative", [False, True])
def test_the_low_bit_copy_of_specache_is_kivis(model, speculative):
    """With nothing fetched logits are KIVI's; with every token fetched they are those of the full cache."""
    ids = torch.randint(2, 100, (1, 130), generator=torch.Generator().manual_seed(6))
    asked = {**METHODS["specache"], "key_bias": "folded", "speculative": speculative}
    low = logits_behind(model, ids, 110, **{**asked, "k": 0})
    kivi = logits_behind(model, ids, 110, **METHODS["kivi"], key_bias="folded")
    full = logits_behind(model, ids, 110, method="full")
    whole = logits_behind(model, ids, 110, **{**asked, "k": 200})
    assert torch.allclose(low, kivi, atol=LOGITS) and not torch.allclose(low, full, atol=0.1)
    # A speculative step fetches what its guess attends to: every token, once there is a guess.
    assert torch.allclose(whole[:, 1:], full[:, 1:], atol=LOGITS)


def test_more_tokens_than_a_tile(model):
    tokens = tokens_of(model, TILE_TOKENS + 600, seed=1)
    for name in ("rtn", "kivi"):
        cache = opened(model, name)
        cache.release()
        feed(cache, [tokens[: TILE_TOKENS + 500]])
        check_next(cache, [tokens[TILE_TOKENS + 500 : TILE_TOKENS + 501]])
        check_next(cache, [tokens[TILE_TOKENS + 501 : TILE_TOKENS + 520]])


@pytest.mark.parametrize("name", METHODS)
def test_a_row_is_stored_alike_alone_in_a_batch_and_however_its_tokens_arrive(model, name):
    mine, other = tokens_of(model, 150, seed=1), tokens_of(model, 90, seed=3)
    contents = []
    for cuts, beside in (([150], False), ([1, 149], False), ([100, 50], True), ([64] + [1] * 86, True)):
        cache, at = opened(model, name), 0
        cache.release()
        for count in cuts:
            feed(cache, [mine[at : at + count], *([other[at : at + count]] if beside else [])])
            at += count
        contents.append(stored(cache, 0))
    for found in contents[1:]:
        assert not differing(found, contents[0])


# --- errors with it and without -----------------------------------------------------------------------------------------


def logits_behind(model, ids: torch.Tensor, prompt: int, **options) -> torch.Tensor:
    """Logits of every token from `prompt` on, fed one a step."""
    with compress(model, **options) as cache, torch.no_grad():
        model(ids[:, :prompt], past_key_values=cache)
        steps = [model(ids[:, n : n + 1], past_key_values=cache).logits for n in range(prompt, ids.shape[1])]
    return torch.cat(steps, 1)


@pytest.mark.full
@pytest.mark.parametrize(("name", "gain"), [("rtn", 2.5), ("kivi", 1.2)])
def test_folding_takes_most_of_the_error(model, name, gain):
    """Root mean square error of logits: with `key_bias="kept"` it is larger, because the bias widens the range of every key."""
    ids = torch.randint(2, 100, (2, 220), generator=torch.Generator().manual_seed(1))
    full = logits_behind(model, ids, 150, method="full")
    errors = {
        word: float((logits_behind(model, ids, 150, **METHODS[name], key_bias=word) - full).square().mean().sqrt())
        for word in ("kept", "folded")
    }
    assert errors["kept"] > gain * errors["folded"], errors


@pytest.mark.full
@pytest.mark.parametrize("sliding", [False, True])
def test_fine_codes_give_the_full_caches_logits(model, sliding):
    """The folded bias is not lost: at 8 bits logits are nearly the exact cache's, and with the bias kept in every key they are
    not. Also with a sliding window, behind which pages are freed."""
    if sliding:
        model = biased_model(use_sliding_window=True, sliding_window=48, layer_types=["sliding_attention"] * 2)
    ids = torch.randint(2, 100, (1, 330), generator=torch.Generator().manual_seed(2))
    full = logits_behind(model, ids, 250, method="full")
    off = {}
    for word in ("kept", "folded"):
        found = logits_behind(model, ids, 250, method="rtn", bits=8, key_bias=word)
        off[word] = float((found - full).square().mean().sqrt() / full.std())
    assert off["folded"] < 0.03 and off["kept"] > 4 * off["folded"], off


# --- everything else that a cache does ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", METHODS)
def test_generation_and_a_saved_prefix(model, name, tmp_path):
    inputs, path = left_padded([60, 33]), tmp_path / "prefix.safetensors"
    settings = {"max_new_tokens": 12, "do_sample": False}
    with opened(model, name) as cache:
        model.generate(**inputs, past_key_values=cache, **settings)
        memory = cache.memory()
    assert abs(memory.predicted_bytes / memory.measured_bytes - 1) < 0.01
    # Codes of eight bits are fine enough for the beams of an exact cache.
    with compress(model, **METHODS[name] | {"bits": 8, "key_bias": "folded"}) as cache:
        beams = model.generate(**inputs, past_key_values=cache, num_beams=3, **settings)
    assert torch.equal(beams, model.generate(**inputs, num_beams=3, **settings))
    with opened(model, name) as cache, torch.no_grad():
        model(inputs["input_ids"][:1], past_key_values=cache)
        cache.save(path)
        following = inputs["input_ids"][1:, -1:]
        logits = model(following, past_key_values=cache).logits
    with opened(model, name, prefix=path) as cache, torch.no_grad():
        assert torch.equal(model(following, past_key_values=cache).logits, logits)
    with pytest.raises(ValueError, match="key_bias"):
        compress(model, **METHODS[name], prefix=path)


@pytest.mark.full
@pytest.mark.filterwarnings("always:no kernel supports")
def test_where_kernels_read_pages_a_folded_bias_is_read_without_them(model, monkeypatch):
    """A warning says so, once."""
    ids = torch.randint(2, 100, (1, 60), generator=torch.Generator().manual_seed(7))
    asked = {**METHODS["kivi"], "key_bias": "folded"}
    expected = logits_behind(model, ids, 55, **asked)
    monkeypatch.setenv("CALIB_KERNELS", "triton")
    monkeypatch.setattr(unserved, "_told", set())
    with pytest.warns(
        UserWarning, match="no kernel supports key_bias='folded': attention reads pages tile by tile"
    ) as told:
        found = [logits_behind(model, ids, 55, **asked) for _ in range(2)]
    assert [one.filename for one in told if "key_bias=" in str(one.message)] == [__file__]
    assert all(torch.allclose(one, expected, atol=LOGITS) for one in found)


@pytest.mark.full
@pytest.mark.parametrize("name", ["rtn", "kivi"])
def test_replayed_steps(model, name, monkeypatch):
    monkeypatch.setattr(step_graphs, "recorder", lambda device: Tape)
    monkeypatch.setenv("CALIB_KERNELS", "reference")
    inputs, found = left_padded([60, 33]), []
    for graphs in (False, True):
        with opened(model, name, graphs=graphs) as cache:
            found.append(model.generate(**inputs, past_key_values=cache, max_new_tokens=80, do_sample=False))
    assert torch.equal(*found)


# --- what is refused ----------------------------------------------------------------------------------------------------


def test_what_is_refused(model):
    wrong = [
        (model, {"method": "rtn", "key_bias": "gone"}, "key_bias must be one of kept, folded, got 'gone'"),
        (random_model("llama"), {"method": "kivi"}, "no bias of keys in layer 0 for key_bias='folded' to subtract; use"),
        (random_model("qwen3", attention_bias=True), {"method": "rtn"}, r"normalises keys \(k_norm\) after adding their bias"),
        (
            biased_model(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}),
            {"method": "rtn"},
            "whose frequencies change with the length; use key_bias='kept'",
        ),
        (
            GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=64, vocab_size=101, pad_token_id=0)),
            {"method": "rtn"},
            "has 0 key projections k_proj in layer 0, expected one; use key_bias='kept'",
        ),
        (model, {"method": "specache", "low": {"method": "rtn"}}, "key_bias='folded' is an option of the default low-bit copy"),
    ]  # fmt: skip
    for asked, options, told in wrong:
        before = asked.config._attn_implementation
        with pytest.raises(ValueError, match=told) as error:
            compress(asked, **{"key_bias": "folded", **options})
        assert "\n" not in str(error.value) and asked.config._attn_implementation == before
