"""Chunks in blocks of vLLM's paged memory, in all of vLLM's memory orders: read and written, against an independent indexing."""

import pytest
import torch
from one_line import message

from calib.serve.vllm import cpu_order as asked
from calib.serve.vllm.cpu_order import cpu_order
from calib.serve.vllm.paged_memory import PagedMemory

pytestmark = pytest.mark.arithmetic

LAYERS, HEADS, D, TOKENS, BLOCKS = 3, 2, 32, 32, 6


def names(count=LAYERS):
    return [f"model.layers.{layer}.self_attn.attn" for layer in range(count)]


def memory_of(strides, tokens=TOKENS, dtype=torch.float16):
    """Memory `[blocks, heads, tokens, 2 * D]` of each layer, filled with 7, with its axes in the order `strides` in memory."""
    shape = [BLOCKS * TOKENS // tokens, HEADS, tokens, 2 * D]
    order = [strides.index(axis) for axis in range(4)]
    return {
        name: torch.full([shape[axis] for axis in strides], 7.0, dtype=dtype).permute(order)
        for name in reversed(names())
    }


def entry(memory, packed, block, offset, head, parts):
    """Views of one token's keys and values `[D]`."""
    page = memory[block * parts + offset // memory.shape[2], head]
    offset %= memory.shape[2]
    if packed:
        return page[offset, :D], page[offset, D:]
    keys, values = page.reshape(-1).chunk(2) if not page.is_contiguous() else page.view(-1).chunk(2)
    return keys.view(D, -1)[:, offset], values.view(-1, D)[offset]


CASES = [
    ("token by token, heads first", (0, 1, 2, 3), True, TOKENS),
    ("token by token, tokens first", (0, 2, 1, 3), True, TOKENS),
    ("heads outermost", (1, 0, 2, 3), True, TOKENS),
    ("shorter blocks of the kernel", (0, 2, 1, 3), True, TOKENS // 2),
    ("as a CPU packs blocks", (0, 1, 2, 3), False, TOKENS),
]


@pytest.mark.parametrize(("strides", "packed", "tokens"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_blocks_are_read_and_written_and_nothing_else(strides, packed, tokens, dtype):
    caches, draw = memory_of(strides, tokens, dtype), torch.Generator().manual_seed(0)
    order = None if packed else cpu_order("vec", tokens, D, dtype)
    own = PagedMemory(caches, LAYERS, HEADS, D, TOKENS, order)
    blocks, parts = [4, 1, 3], TOKENS // tokens
    chunk = torch.randn(2, LAYERS, 3 * TOKENS, HEADS * D, generator=draw).to(dtype)
    own.write(blocks, chunk)
    rows = chunk.unflatten(-1, (HEADS, D))
    for layer, name in enumerate(names()):
        for at in range(0, 3 * TOKENS, 5):
            for head in range(HEADS):
                keys, values = entry(caches[name], packed, blocks[at // TOKENS], at % TOKENS, head, parts)
                assert torch.equal(keys, rows[0, layer, at, head]) and torch.equal(values, rows[1, layer, at, head])
        for block in (0, 2, 5):
            assert bool((caches[name][block * parts : (block + 1) * parts] == 7).all())
    assert torch.equal(own.read(blocks), chunk) and own.read([1]).is_contiguous()
    assert torch.equal(own.read([3, 4]), torch.cat([chunk[:, :, 2 * TOKENS :], chunk[:, :, :TOKENS]], 2))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda caches: caches.popitem(), "2 layers"),
        (lambda caches: caches.update({"model.layers.0.cross.attn": next(iter(caches.values()))}), "4 layers"),
        (
            lambda caches: caches.update({names()[1]: torch.zeros(2, BLOCKS, TOKENS, HEADS, D).half()}),
            "plain attention",
        ),
        (lambda caches: caches.update({names()[1]: torch.zeros(BLOCKS, 1, TOKENS, 2 * D).half()}), "plain attention"),
        (lambda caches: caches.update({names()[1]: torch.zeros(BLOCKS, HEADS, 24, 2 * D).half()}), "plain attention"),
        (lambda caches: caches.update({name: one.float() for name, one in [*caches.items()][:1]}), "all alike"),
        (lambda caches: caches.update({name: one.byte() for name, one in caches.items()}), "uint8"),
    ],
)
def test_memory_of_another_model_is_refused(change, words):
    caches = memory_of((0, 1, 2, 3))
    change(caches)
    with pytest.raises(ValueError, match=words) as error:
        PagedMemory(caches, LAYERS, HEADS, D, TOKENS)
    message(error)


def test_an_operation_that_changes_entries_is_refused(monkeypatch):
    def rounds(keys, values, key_cache, value_cache, *rest, **named):
        key_cache.zero_(), value_cache.zero_()

    monkeypatch.setattr(asked._custom_ops, "cpu_attn_reshape_and_cache", rounds)
    with pytest.raises(ValueError, match="does not store entries unchanged") as error:
        cpu_order("vec", TOKENS, D, torch.float16)
    message(error)
