"""Attention over packed pages against attention over the decoded tokens in float64; and a CUDA graph that is replayed while rows
grow."""

from dataclasses import replace

import pytest
import torch
from gpu.moved import moved, near

from benchmarks.gpu.inputs import queries, tokens
from calib.kernels.attend.operation import EXACT, PackedStream, PageSpan, attend_pages, supported
from calib.kernels.pack.reference import unpack
from calib.kernels.quantise.operation import encode_uniform
from calib.kernels.quantise.reference import dequantise

CPU, PAGE = torch.device("cpu"), 128

# Products are of float16 numbers, and probabilities are rounded to float16: an error of 6e-4 is expected. A missing bias gives
# 1e-2.
OUTPUT = 2e-3
PRECISE = 1e-4  # queries and weights in two parts of float16 each


def stream(x, bits, group, monkeypatch):
    """Pack pages `x [pages, kv_heads, PAGE, D]`; return them and the decoded tokens, float64."""
    if bits == EXACT:
        return PackedStream(EXACT, x, x.shape[-1]), x.double()
    with monkeypatch.context() as plain:
        plain.setenv("CALIB_KERNELS", "reference")
        words, parameters = encode_uniform(x, group, bits, 1.0, torch.float16)
    decoded = dequantise(unpack(words, bits, x.shape[-1]), parameters, group)
    return PackedStream(bits, words, x.shape[-1], parameters, group[0]), decoded.double()


def tier(bits, group, dim, times, dtype, monkeypatch, heads=2, rows=2):
    """Packed keys, packed values, page table, and the decoded keys and values of each row, `[rows, kv_heads, slots, D]`."""
    each = 2 * times
    table = torch.randperm(rows * each, generator=torch.Generator().manual_seed(1)).view(rows, each)
    found, decoded = [], []
    for seed, own in ((1, group[0]), (2, group[1])):
        pages, exact = stream(tokens(rows * each, heads, PAGE, dim, seed, CPU, dtype), bits, own, monkeypatch)
        found.append(pages)
        decoded.append(exact[table].transpose(1, 2).flatten(2, 3))
    return *found, table.int(), *decoded


def softmax(query, keys, values, used):
    """Output and log-sum-exp in float64."""
    logits = query.double() @ keys.mT
    logits.masked_fill_((torch.arange(keys.shape[2]) >= used[:, None])[:, None, None], -torch.inf)
    return logits.softmax(-1) @ values, logits.logsumexp(-1)


def grouped(keys, rows, seed=0):
    """`rows` query rows of every KV head, multiplied by the scale of scores."""
    query = queries(keys.to(torch.bfloat16), keys.shape[1] * rows, 1, seed)
    return query.float().unflatten(1, (keys.shape[1], rows))[:, :, :, 0] * keys.shape[-1] ** -0.5


CASES = [
    # bits, (keys' group, values' group), head_dim, query rows, dtype
    (4, ((32, 1), (1, 32)), 128, 4, torch.bfloat16),
    (2, ((32, 1), (1, 32)), 128, 4, torch.bfloat16),
    (4, ((128, 1), (1, 128)), 128, 1, torch.bfloat16),
    (2, ((128, 1), (1, 128)), 128, 8, torch.float16),
    (4, ((1, 64), (1, 64)), 64, 8, torch.float16),
    (1, ((64, 1), (1, 64)), 64, 2, torch.float16),
    (3, ((32, 1), (1, 80)), 80, 4, torch.bfloat16),
    (8, ((32, 1), (1, 96)), 96, 1, torch.bfloat16),
    (4, ((64, 1), (1, 256)), 256, 16, torch.bfloat16),
    (EXACT, ((1, 1), (1, 1)), 128, 4, torch.bfloat16),
    (EXACT, ((1, 1), (1, 1)), 64, 4, torch.float16),
]


@pytest.mark.parametrize(("bits", "group", "dim", "rows", "dtype"), CASES)
def test_a_tier(device, times, bits, group, dim, rows, dtype, monkeypatch):
    keys, values, table, *decoded = tier(bits, group, dim, times, dtype, monkeypatch)
    used = torch.tensor([2 * times * PAGE - 5, 63], dtype=torch.int32)
    query = grouped(decoded[0], rows)
    query, keys, values, span = moved((query, keys, values, PageSpan(table, used)), device)
    assert supported(rows, keys, values)
    output, normaliser = softmax(query.cpu(), *decoded, used)
    for precise, limit in ((False, OUTPUT), (True, PRECISE if bits < EXACT else OUTPUT)):
        found = attend_pages(query, keys, values, span, precise=precise)
        near(found.mixed / found.mass, output, limit)
        near((found.top + found.mass.log())[..., 0], normaliser, limit)


def test_calibrated_ranges(device, times, monkeypatch):
    """Codes without parameters in pages: all codes of a head have one scale and zero point."""
    keys, values, table, *_ = tier(4, ((32, 1), (1, 32)), 128, times, torch.bfloat16, monkeypatch)
    fixed = [(torch.rand(2, 1, 1) + 0.1, -torch.rand(2, 1, 1)) for _ in range(2)]
    streams, decoded = [], []
    for stored, (scale, zero) in zip((keys, values), fixed, strict=True):
        streams.append(replace(stored, parameters=None, group_tokens=1, fixed=(scale, zero)))
        exact = unpack(stored.pages, 4, 128).double() * scale + zero
        decoded.append(exact[table.long()].transpose(1, 2).flatten(2, 3))
    used = torch.tensor([100, 200], dtype=torch.int32)
    query = grouped(decoded[0], 4)
    found = attend_pages(*moved((query, *streams, PageSpan(table, used)), device))
    near(found.mixed / found.mass, softmax(query, *decoded, used)[0], OUTPUT)


def test_scores_softcap_and_hidden_slots(device, times, monkeypatch):
    keys, values, table, *decoded = tier(4, ((32, 1), (1, 32)), 128, times, torch.bfloat16, monkeypatch)
    slots = table.shape[1] * PAGE
    used = torch.tensor([slots, slots - 70], dtype=torch.int32)
    query, hidden = grouped(decoded[0], 4), torch.rand(2, 2, slots) < 0.3
    span = PageSpan(table, used, hidden)
    given = moved((query, keys, values, span), device)
    found = attend_pages(*given, constant=torch.full((2, 2, 4, 1), 0.5, device=device), softcap=5.0, scored=True)
    assert found.scores is not None
    logits = torch.tanh((query.double() @ decoded[0].mT + 0.5) / 5) * 5
    gone = hidden | (torch.arange(slots) >= used[:, None])[:, None]
    near((found.mixed / found.mass), logits.masked_fill(gone[:, :, None], -torch.inf).softmax(-1) @ decoded[1], OUTPUT)
    seen = ~gone[:, :, None].expand_as(logits)
    near(found.scores.cpu()[seen], logits[seen], OUTPUT)
    assert bool((found.scores.cpu()[~seen] == -torch.inf).all())


def test_a_graph_goes_on_with_longer_rows(device, times, monkeypatch):
    """One graph is replayed at several lengths: the kernel reads the lengths on the device, so growing rows need no new
    recording."""
    keys, values, table, *decoded = tier(4, ((32, 1), (1, 32)), 128, times, torch.bfloat16, monkeypatch)
    used = torch.tensor([100, 17], dtype=torch.int32)
    given = moved((grouped(decoded[0], 4), keys, values, PageSpan(table, used.clone())), device)
    query, held = given[0], given[3].used
    if device.type != "cuda":
        pytest.skip("needs a CUDA device: CUDA graphs")
    attend_pages(*given)  # compiled outside
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = attend_pages(*given)
    for step in range(5):
        asked = grouped(decoded[0], 4, seed=step)
        query.copy_(asked)
        found.mixed.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        output, _ = softmax(asked, *decoded, used)
        near(found.mixed / found.mass, output, OUTPUT)
        held += 37
        used += 37
