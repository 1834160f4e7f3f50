"""InfLLM with `prefill="blocks"`: one long forward gives what its chunks give one after the other, with any batch and padding."""

import pytest
import torch
from layer_walk import Tokens, differing, feed, stored
from one_line import message
from tolerances import LOGITS
from toy_models import generate, left_padded, random_model

from calib.runtime import compress

CHUNK = 24
OPTIONS = {"initial": 8, "window": 40, "block": 8, "representatives": 2, "fetched": 3}
BLOCKS = OPTIONS | {"prefill": "blocks", "chunk": CHUNK}


@pytest.fixture(scope="module")
def model():
    return random_model("llama")


def logits(model, cache, ids: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    """Logits of `ids [rows, n]`, fed in forwards of these sizes."""
    with torch.no_grad():
        parts = [model(input_ids=part, past_key_values=cache).logits for part in ids.split(sizes, 1)]
    return torch.cat(parts, 1)


def ids_of(rows: int, length: int, seed: int = 0) -> torch.Tensor:
    return left_padded([length] * rows, seed)["input_ids"]


@pytest.mark.full
@pytest.mark.parametrize("positions", ["cache", "original"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral-sliding"])
def test_one_forward_is_chunk_after_chunk(family, positions):
    """Logits and stored tokens are bit for bit those of forwards of one chunk each. A sliding window is shorter than the prompt."""
    model, ids = random_model(family), ids_of(2, 301)
    found = []
    for options, sizes in (
        (BLOCKS, [200, 1, 100]),
        (OPTIONS | {"prefill": "exact"}, [CHUNK] * 8 + [8, 1] + [CHUNK] * 4 + [4]),
    ):
        with compress(model, "infllm", positions=positions, **options) as cache:
            found.append((logits(model, cache, ids, sizes), [stored(cache, row) for row in range(2)]))
    assert torch.equal(found[0][0], found[1][0])
    for mine, other in zip(found[0][1], found[1][1], strict=True):
        host = {name for name in mine if name.startswith(("0.host", "1.host"))}
        if family == "mistral-sliding":  # the long forward keeps tokens on the host that its last chunk no longer sees
            assert all(mine[name].shape[1] >= other[name].shape[1] for name in host)
            mine, other = ({name: part for name, part in own.items() if name not in host} for own in (mine, other))
        assert not differing(mine, other, mass=0)


def test_a_short_prompt_is_exact_and_a_long_one_is_not(model):
    for length, same in ((CHUNK, True), (120, False)):
        found = []
        for options in (BLOCKS, OPTIONS | {"prefill": "exact"}):
            with compress(model, "infllm", **options) as cache:
                found.append(logits(model, cache, ids_of(1, length), [length]))
        assert torch.equal(*found) == same


@pytest.mark.full
def test_a_row_does_not_depend_on_its_neighbours_or_its_padding(model):
    """One row ends with a chunk, others within one, and one is shorter than a chunk."""
    lengths = [150, 37, 96, 5]
    inputs = left_padded(lengths)
    with compress(model, "infllm", **BLOCKS) as cache:
        together = generate(model, inputs, cache)
    for row, length in enumerate(lengths):
        alone = {name: part[row : row + 1, -length:] for name, part in inputs.items()}
        with compress(model, "infllm", **BLOCKS) as cache:
            single = generate(model, alone, cache)
        assert torch.equal(single.sequences[0, length:], together.sequences[row, len(inputs["input_ids"][0]) :])
        for mine, other in zip(single.logits, together.logits, strict=True):
            torch.testing.assert_close(mine[0], other[row], rtol=0, atol=LOGITS)


@pytest.mark.arithmetic
@pytest.mark.parametrize("rejected", [0, 3, 30])
def test_drafts_of_many_chunks_attend_as_they_will_be_stored(model, rejected):
    """Prompt lookup begins with a prompt and its drafts in one forward, of which nothing is stored before it is confirmed."""
    tokens = [Tokens.random(model, size, seed=seed) for seed, size in enumerate((130, 70))]
    drafted, plain = (compress(model, "infllm", **BLOCKS) for _ in range(2))
    for cache in (drafted, plain):
        cache.release()
        feed(cache, [row[:20] for row in tokens])
    before = [stored(drafted, row) for row in range(2)]
    drafted.activate_past_recording()
    found, expected = (feed(cache, [row[20:] for row in tokens]) for cache in (drafted, plain))
    for mine, other in zip(found, expected, strict=True):
        assert all(torch.equal(*pair) for pair in zip(mine, other, strict=True))
    assert all(not differing(stored(drafted, row), before[row], mass=0) for row in range(2))
    drafted.crop(-rejected)
    again = compress(model, "infllm", **BLOCKS)
    again.release()
    feed(again, [row[:20] for row in tokens])
    feed(again, [row[20 : len(row) - rejected] for row in tokens])
    assert drafted.sequences.lengths == [130 - rejected, 70 - rejected]
    for row in range(2):
        assert not differing(stored(drafted, row), stored(again, row), mass=0)


def test_prompt_lookup_says_what_greedy_decoding_says(model):
    """With every block fetched for every chunk, at its own positions. Else a draft's query helps to choose the blocks of its chunk,
    so that tokens before it may differ."""
    inputs, found = {"input_ids": ids_of(1, 30, seed=1).repeat(1, 5)}, []
    for way, first in (({}, 150), ({"prompt_lookup_num_tokens": 4}, 154)):
        fed: list[int] = []
        hook = model.register_forward_pre_hook(
            lambda _, __, named, fed=fed: fed.append(named["input_ids"].shape[1]), with_kwargs=True
        )
        with compress(model, "infllm", **BLOCKS | {"fetched": 20, "positions": "original"}) as cache:
            found.append(generate(model, inputs, cache, max_new_tokens=3, **way))
        hook.remove()
        assert fed[0] == first  # the prompt, and its drafts
    assert torch.equal(found[0].sequences, found[1].sequences)
    for plain, drafted in zip(found[0].logits, found[1].logits, strict=True):
        torch.testing.assert_close(drafted, plain, rtol=0, atol=LOGITS)


def test_gradients_of_a_prompt_of_many_chunks_are_refused_in_a_line(model):
    """A prompt of one chunk has the gradients of plain attention, as any prompt has."""
    for length, refused in ((CHUNK, False), (2 * CHUNK, True)):
        with compress(model, "infllm", **BLOCKS) as cache:
            total = model(input_ids=ids_of(1, length), past_key_values=cache).logits.sum()
            if not refused:
                total.backward()
                continue
            with pytest.raises(ValueError, match="gradients do not go through a compressed cache") as caught:
                total.backward()
            assert "torch.no_grad()" in message(caught)
