"""Times the attention kernel over one tier without a layer around it: how much of a decode step the kernel takes."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu.agreement import agree
from benchmarks.gpu.bench import Bench, Measured, NotMeasured
from benchmarks.gpu.copy_rate import copy_rate
from benchmarks.gpu.decode_attention import attend_each, fitting, shape_a
from benchmarks.gpu.graphs import replayed
from benchmarks.gpu.layers import Step, prompt_of
from benchmarks.gpu.sdpa import fastest_decode
from benchmarks.gpu.turns import in_turns
from calib.kernels.attend.operation import PackedStream, PageSpan, attend_pages, supported
from calib.kernels.pack.reference import unpack
from calib.kernels.quantise.operation import encode_uniform
from calib.kernels.quantise.reference import dequantise

PAGE = 128
KERNEL = 2e-3  # largest relative distance of outputs: probabilities are rounded to float16

Tier = tuple[PackedStream, PackedStream]


@torch.no_grad()
def alone(bench: Bench) -> Measured:
    """Returns the figures "4 bit" and "2 bit", SDPA's time over the kernel's, and "share, ...", bytes read over the copy rate."""
    bench.needs_kernel("attend", "quantise")
    heads = shape_a(bench)
    exact = [prompt_of(bench, heads, seed) for seed in range(bench.sizes.sets)]
    steps = [Step.drawn(bench, heads, keys, 100 + seed) for seed, (keys, _) in enumerate(exact)]
    span = table_of(bench, heads.rows)
    asked = [grouped(step.query, heads.kv_heads) for step in steps]
    name, attention, known = fastest_decode(bench, steps[0].query, *exact[0])
    calls: dict[str, Callable[[], object]] = {"sdpa": partial(attend_each, attention, exact, steps)}
    sizes, apart = {}, {}
    for bits in (4, 2):
        tiers = [tier(bits, fitting(bench)["group"], *given) for given in exact]
        call = partial(every, bench, asked, tiers, span)
        apart[bits] = agree(f"attention at {bits} bits", call(), expected(asked[-1], *tiers[-1], span.table), KERNEL)
        sizes[bits] = sum(map(packed_bytes, tiers))
        calls[f"{bits} bit"], calls[f"{bits} bit again"] = call, call
    timed, ways = {}, {}
    for own, step in calls.items():
        timed[own], ways[own] = replayed(bench, step, None)
    pairs = {f"{bits} bit": ("sdpa", f"{bits} bit") for bits in sizes}
    found = in_turns(bench, timed, pairs | {"A/A": ("4 bit again", "4 bit")})
    figures = {name: found["ratios"][name] for name in pairs}
    for bits, size in sizes.items():
        slow_first = reversed(found["milliseconds"][f"{bits} bit"])
        figures[f"share, {bits} bit"] = [size / (1e-3 * taken) / copy_rate(bench) for taken in slow_first]
    details = {"baseline": name, "baselines_milliseconds": known, "distance_to_decoded": apart, "packed_bytes": sizes}
    return Measured(figures, {**details, "timed": ways, **found})


def table_of(bench: Bench, rows: int) -> PageSpan:
    """Returns the page table of all tokens of all rows, with consecutive pages."""
    pages = bench.sizes.tokens // PAGE
    numbers = torch.arange(rows * pages, dtype=torch.int32, device=bench.device).view(rows, pages)
    return PageSpan(numbers, torch.full((rows,), pages * PAGE, dtype=torch.int32, device=bench.device))


def grouped(query: Tensor, kv_heads: int) -> Tensor:
    """Returns one token's query by KV head, `[rows, kv_heads, group, D]` float32, times the softmax scale."""
    return query.float().unflatten(1, (kv_heads, -1))[:, :, :, 0] * query.shape[-1] ** -0.5


def tier(bits: int, group: int, keys: Tensor, values: Tensor) -> Tier:
    """Returns keys (groups of a channel) and values (groups of a token) packed in pages."""
    streams = []
    for x, own in ((keys, (PAGE, 1)), (values, (1, group))):
        pages = x.unflatten(2, (-1, PAGE)).transpose(1, 2).flatten(0, 1).contiguous()
        words, parameters = encode_uniform(pages, own, bits, 1.0, torch.float16)
        streams.append(PackedStream(bits, words, x.shape[-1], parameters, own[0]))
    return streams[0], streams[1]


def packed_bytes(streams: Tier) -> int:
    """Returns the bytes of words and parameters of keys and values."""
    return sum(part.nbytes for stream in streams for part in (stream.pages, stream.parameters) if part is not None)


def every(bench: Bench, asked: list[Tensor], tiers: list[Tier], span: PageSpan) -> Tensor:
    """Attends over all sets of inputs; returns the last output, `[rows, kv_heads, group, D]`."""
    for query, (keys, values) in zip(asked, tiers, strict=True):
        if supported(query.shape[2], keys, values):
            found = attend_pages(query, keys, values, span)
            output = found.mixed / found.mass
        elif bench.on_gpu:
            raise NotMeasured("the kernel of attend did not serve these inputs")
        else:
            output = expected(query, keys, values, span.table)
    return output


def expected(query: Tensor, keys: PackedStream, values: PackedStream, numbers: Tensor) -> Tensor:
    """Returns the attention output over the decoded tokens in float32, `[rows, kv_heads, group, D]`."""
    rows = []
    for row, pages in enumerate(numbers.long()):
        first, second = (decoded(stream, pages) for stream in (keys, values))
        rows.append((query[row] @ first.mT).softmax(-1) @ second)
    return torch.stack(rows)


def decoded(stream: PackedStream, pages: Tensor) -> Tensor:
    """Returns a row's decoded pages, float32 `[kv_heads, tokens, D]`."""
    assert stream.parameters is not None
    words, parameters = stream.pages[pages], stream.parameters[pages]
    columns = parameters.shape[-1] // 2
    found = dequantise(
        unpack(words, stream.bits, stream.channels), parameters, (stream.group_tokens, stream.channels // columns)
    )
    return found.transpose(0, 1).flatten(1, 2)
