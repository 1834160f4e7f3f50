"""Memory of SpeCache, InfLLM and offload: parts counted by hand, on the device and on the host, while a text grows."""

import pytest
import torch
from tolerances import MEMORY
from toy_models import generate, left_padded, random_model

from calib.runtime import compress
from calib.runtime.memory import Memory
from calib.runtime.paging.page_numbers import PAGE_TOKENS

LAYERS, HEADS, WIDTH, ITEM = 2, 2, 64, 2  # of "llama-64" in 16 bits
PAIR = 2 * WIDTH * ITEM  # bytes of a token's key and value
TIER_PAGE = 64  # tokens


@pytest.fixture(scope="module")
def model():
    return random_model("llama-64", torch.bfloat16)


def whole(tokens: int, size: int) -> int:
    """The number of pieces of `size` tokens for so many `tokens`."""
    return -(-tokens // size)


def told(model, lengths: list[int], steps: int, every: int, **wanted):
    """Yields a cache, its memory and its rows' lengths after the prompt and after every `every`-th of `steps` decode steps."""
    inputs = left_padded(lengths)
    mask = inputs["attention_mask"]
    forward = torch.no_grad()(model)  # around each call: two of these generators may run by turns
    with compress(model, **wanted) as cache:
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        token = forward(**inputs, position_ids=positions, past_key_values=cache).logits[:, -1:].argmax(-1)
        yield cache, cache.memory(), list(cache.sequences.lengths)
        for step in range(1, steps + 1):
            mask = torch.nn.functional.pad(mask, (0, 1), value=1)
            positions = mask.sum(1, keepdim=True) - 1
            found = forward(token, attention_mask=mask, position_ids=positions, past_key_values=cache)
            token = found.logits.argmax(-1)
            if step % every == 0:
                yield cache, cache.memory(), list(cache.sequences.lengths)


def check(memory: Memory, lengths: list[int]) -> int:
    """Checks what holds for all: predicted bytes, bits per value without host memory, whole pages in it. Returns their number."""
    assert abs(memory.measured_bytes - memory.predicted_bytes) <= MEMORY * memory.predicted_bytes
    assert memory.bits_per_value == pytest.approx(
        8 * memory.measured_bytes / (sum(lengths) * LAYERS * HEADS * 2 * WIDTH)
    )
    pages, rest = divmod(memory.host_bytes, LAYERS * HEADS * PAGE_TOKENS * PAIR)
    needed = sum(whole(length, PAGE_TOKENS) for length in lengths)
    assert rest == 0 and needed <= pages <= needed + max(len(lengths), needed // 16)
    assert f"; {memory.host_bytes:,} bytes in host memory" in str(memory)
    return pages


@pytest.mark.full
@pytest.mark.parametrize("bits", [1, 2, 4])
@pytest.mark.parametrize("k", [0, 7, 32, 50, 5000])
@pytest.mark.parametrize("lengths", [[1], [300], [40, 150, 129]], ids=str)
def test_specache_is_a_low_bit_copy_and_k_rows(model, lengths, k, bits):
    residual, most = 32, 0
    for cache, memory, now in told(model, lengths, 70, 10, method="specache", k=k, bits=bits, residual=residual):
        check(memory, now)
        steps, kinds, rows = now[0] - lengths[0], memory.by_kind, len(now)
        pages = cache.sequences.table.capacity  # of codes: what is encoded, or will be within a few steps
        encoded = [length - length % residual for length in now]
        assert sum(whole(count, PAGE_TOKENS) for count in encoded) <= pages
        slots = LAYERS * HEADS * pages * PAGE_TOKENS
        assert kinds["codes"] == slots * 2 * WIDTH * bits // 8
        # A scale and a zero point for 32 tokens of a channel, and for 32 channels of a token.
        assert kinds["parameters"] == slots * 2 * (2 * WIDTH // 32) * 2
        keys = residual if any(length % residual for length in now) else 0
        values = min(max(now), residual)
        values = whole(values, 32) * 32
        assert kinds["window"] == LAYERS * HEADS * rows * (keys + values) * WIDTH * ITEM
        # Entries come 32 at a time, never more than k; the newest chosen are fetched already.
        most = max(most, *encoded) if steps else 0
        entries = min(k, whole(min(k, most), 32) * 32)
        assert kinds["fetched"] == LAYERS * (HEADS * rows * entries * (PAIR + 4) + 8)
        assert sum(kinds.values()) - kinds["tables"] == sum(
            kinds[kind] for kind in ("codes", "parameters", "window", "fetched")
        )
        assert kinds["tables"] <= 4 * rows * (2 * whole(max(now), PAGE_TOKENS))


@pytest.mark.full
@pytest.mark.parametrize("speculative", [True, False], ids=["ahead", "late"])
def test_specache_beside_its_low_bit_copy_alone(model, speculative):
    """On the device only fetched tokens and page numbers are added to the bytes of `kivi`."""
    wanted = {"method": "specache", "k": 40, "residual": 32, "speculative": speculative}
    low = {"method": "kivi", "residual": 32}
    for (_, mine, now), (_, other, same) in zip(
        told(model, [200, 90], 60, 12, **wanted), told(model, [200, 90], 60, 12, **low), strict=True
    ):
        assert now == same and other.host_bytes == 0 and "host" not in str(other)
        added = mine.by_kind["fetched"] + mine.by_kind["tables"] - other.by_kind["tables"]
        assert mine.measured_bytes - other.measured_bytes == added
        assert mine.marginal_bits == other.marginal_bits
        entries = 40 if now[0] > 200 else 0
        assert mine.by_kind["fetched"] == LAYERS * (HEADS * 2 * entries * (PAIR + 4) + 8)


@pytest.mark.full
@pytest.mark.parametrize("positions", ["cache", "original"])
@pytest.mark.parametrize("lengths", [[1], [300], [40, 150, 129]], ids=str)
def test_infllm_is_its_tokens_its_representatives_and_what_was_fetched(model, lengths, positions):
    initial, window, block, count, fetched = 20, 60, 16, 3, 4
    wanted = {"initial": initial, "window": window, "block": block, "representatives": count, "fetched": fetched}
    for _, memory, now in told(model, lengths, 70, 7, method="infllm", positions=positions, **wanted):
        check(memory, now)
        kinds, rows = memory.by_kind, len(now)
        blocks = [max(0, length - initial - window) // block for length in now]
        local = [max(0, length - initial) - own * block for length, own in zip(now, blocks, strict=True)]
        pages = sum(whole(min(length, initial), TIER_PAGE) for length in now)
        assert kinds["exact"] == LAYERS * HEADS * pages * TIER_PAGE * PAIR
        slots = min(window + block, whole(max(local), 32) * 32)
        assert kinds["window"] == LAYERS * HEADS * rows * slots * PAIR
        assert kinds["saliency"] == LAYERS * HEADS * rows * slots * 4
        assert kinds["representatives"] == LAYERS * HEADS * rows * max(blocks) * count * WIDTH * ITEM
        # A forward fetches from the blocks that there were before it; it has entries for their tokens, never fewer again.
        before = max((length - 1 - initial - window) // block for length in now) if now != lengths else 0
        entries = min(fetched * block, whole(min(fetched, max(0, before)) * block, 32) * 32)
        assert kinds["fetched"] == LAYERS * (HEADS * rows * entries * (PAIR + 4) + 8)
        parts = ("exact", "window", "saliency", "representatives", "fetched", "tables")
        assert memory.predicted_bytes == sum(kinds[kind] for kind in parts)


@pytest.mark.full
@pytest.mark.parametrize("lengths", [[1], [300], [40, 150, 129]], ids=str)
def test_offload_has_nothing_on_the_device(model, lengths):
    for _, memory, now in told(model, lengths, 140, 20, method="offload"):
        check(memory, now)
        assert memory.measured_bytes == memory.by_kind["tables"] <= 4 * len(now) * whole(max(now), PAGE_TOKENS)
        assert memory.marginal_bits == 0


@pytest.mark.full
@pytest.mark.parametrize("method", ["specache", "infllm"])
@pytest.mark.parametrize("family", ["qwen3-mixed", "gemma2"])
def test_layers_beside_that_slide(method, family):
    """Sliding layers keep their tokens on the device, also with speculative steps; host memory has only the other layer's."""
    model = random_model(family, sliding_window=200)
    own = {"infllm": {"window": 40, "block": 16}, "specache": {"residual": 32}}[method]
    with compress(model, method, **own) as cache:
        generate(model, left_padded([250, 180]), cache, max_new_tokens=40)
        memory = cache.memory()
    assert abs(memory.measured_bytes - memory.predicted_bytes) <= MEMORY * memory.predicted_bytes
    assert memory.by_kind["uncompressed"] == 2 * 2 * 2 * 199 * 32 * 4  # streams, rows, heads, tokens, channels, bytes
    assert memory.host_bytes % (2 * PAGE_TOKENS * 2 * 32 * 4) == 0 and (memory.compressed_layers, memory.layers) == (
        1,
        2,
    )
    assert "bytes in host memory; 1 of 2 layers are compressed" in str(memory)
