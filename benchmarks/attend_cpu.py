"""Times decode attention of one layer on the CPU: packed pages against quanto's dequantise + cat + SDPA, and against exact SDPA.

    python -m benchmarks.attend_cpu [--tokens 16384] [--turns 31] [--threads 2] [--write]

One process, float32, one row, 8 KV heads of 128, with as many query heads (H8) and with four times as many (H32, as in an 8B
model). Each cache holds the same tokens in one layer; a step stores one more token and attends to all tokens, as a decode step
does. Ours is `update` and `attend` of a compressed layer: `kivi` in groups of 32 with 128 exact tokens, like QuantizedCache, and
`rtn`. The others are transformers' own layers with SDPA: QuantizedCache's of quanto, whose `update` dequantises and concatenates,
and DynamicCache's. The turns fit into the window: no cache quantises a block meanwhile (decode_cpu.py includes that).

Tokens: some channels of the keys are eight times as large, which makes attention peaked; every turn has a new token. Before
anything is timed, our outputs are compared with float64 attention over the decoded pages. All steps are timed in every turn, in
another order each turn; results are medians and quartiles of the ratios within turns, beside an A/A pair.
"""

import argparse
import copy
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.cache_utils import DynamicLayer, QuantoQuantizedLayer

from benchmarks.protocol import keep, show, turn_by_turn
from calib.runtime import compress
from calib.runtime.layer import CompressedLayer
from calib.runtime.logits import Logits

RESULT = "attend_cpu.json"
KV_HEADS, CHANNELS, GROUP, WINDOW = 8, 128, 32, 128
QUERY_HEADS = {"H8": 8, "H32": 32}
CLOSE = 1e-4  # largest difference relative to the largest output: float32 sums in another order

OURS = {"kivi": ("kivi", {"group": GROUP, "residual": WINDOW}), "rtn": ("rtn", {})}
# Pairs of steps: the first is divided by the second.
RATIOS = {
    "A/A": ("kivi again", "kivi"),
    "quanto / kivi": ("quanto", "kivi"),
    "quanto / rtn": ("quanto", "rtn"),
    "exact / kivi": ("exact", "kivi"),
    "exact / rtn": ("exact", "rtn"),
}

QKV = tuple[Tensor, Tensor, Tensor]
Step = Callable[[QKV], Tensor]


def tokens(heads: int, count: int, seed: int) -> QKV:
    """Returns random queries `[1, heads, count, D]`, keys and values `[1, KV_HEADS, count, D]`."""
    draw = torch.Generator().manual_seed(seed)
    query, keys, values = (torch.randn(1, n, count, CHANNELS, generator=draw) for n in (heads, KV_HEADS, KV_HEADS))
    keys[..., 3::40] *= 8
    return query, keys, values


def our_layer(name: str, heads: int, bits: int) -> CompressedLayer:
    """Returns an empty layer of a method, without a model around it."""
    shape = {"num_attention_heads": heads, "num_key_value_heads": KV_HEADS, "head_dim": CHANNELS}
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 32}
    method, options = OURS[name]
    cache = compress(LlamaForCausalLM(LlamaConfig(**sizes, **shape)), method, bits=bits, **options)
    cache.release()
    return cache.compressed[0]


def our_step(layer: CompressedLayer) -> Step:
    def step(given: QKV) -> Tensor:
        query, keys, values = given
        layer.update(keys, values)
        return layer.attend(query, None, Logits(CHANNELS**-0.5))

    return step


def their_step(layer: DynamicLayer | QuantoQuantizedLayer) -> Step:
    def step(given: QKV) -> Tensor:
        query, keys, values = given
        held = layer.update(keys, values)
        return scaled_dot_product_attention(query, *held, enable_gqa=True)

    return step


def opened(heads: int, bits: int, before: QKV) -> tuple[dict[str, Step], dict[str, CompressedLayer]]:
    """Returns every step by name, and our layers; all hold the tokens `before`."""
    layers = {name: our_layer(name, heads, bits) for name in OURS}
    for layer in layers.values():
        our_step(layer)(before)
    layers["kivi again"] = copy.deepcopy(layers["kivi"])
    quanto = QuantoQuantizedLayer(bits, axis_key=0, axis_value=0, q_group_size=GROUP, residual_length=WINDOW)
    peers = {"quanto": quanto, "exact": DynamicLayer()}
    for peer in peers.values():
        peer.update(*before[1:])
    steps = {name: our_step(layer) for name, layer in layers.items()}
    return steps | {name: their_step(peer) for name, peer in peers.items()}, layers


def decoded(layer: CompressedLayer, given: QKV) -> QKV:
    """Returns the tokens as the layer stores them: those in pages encoded and decoded by its codecs, those in the window exact."""
    query, *streams = given
    held = []
    for stream, x in zip(layer.store.streams, streams, strict=True):  # type: ignore[union-attr]
        count = stream.plan.schedule.packed(x.shape[2])
        codec = stream.plan.codec
        held.append(torch.cat([codec.decode(codec.encode(x[:, :, :count]), CHANNELS), x[:, :, count:]], 2))
    return query, held[0], held[1]


def check(layers: dict[str, CompressedLayer], answers: dict[str, Tensor], before: QKV, new: QKV) -> dict[str, float]:
    """Returns the outputs' relative errors (Frobenius norms) from the exact output.

    Exits if one of ours is not attention over its decoded pages.
    """
    for name, layer in layers.items():
        held = decoded(layer, before)
        expected = scaled_dot_product_attention(
            new[0].double(),
            *(torch.cat(pair, 2).double() for pair in zip(held[1:], new[1:], strict=True)),
            enable_gqa=True,
        )
        off = float((answers[name] - expected).abs().max() / expected.abs().max())
        if off > CLOSE:
            raise SystemExit(f"{name} is off by {off:.1e} of the largest output: not attention over its own pages")
    exact = answers["exact"]
    return {name: float((answer - exact).norm() / exact.norm()) for name, answer in answers.items()}


@torch.no_grad()
def measure(heads: int, count: int, bits: int, turns: int) -> dict[str, object]:
    """Returns the milliseconds of every step, and the ratios."""
    if turns + 4 > WINDOW // 2:
        raise SystemExit(f"{turns} turns do not fit into the window of {WINDOW} tokens; at most {WINDOW // 2 - 4}")
    before, first = tokens(heads, count, 0), tokens(heads, 1, 1)
    steps, layers = opened(heads, bits, before)
    errors = check(layers, {name: step(first) for name, step in steps.items()}, before, first)

    def of(turn: int) -> dict[str, Callable[[], object]]:
        new = tokens(heads, 1, 2 + turn)
        return {name: lambda step=step: step(new) for name, step in steps.items()}

    return {"relative_error": errors, **turn_by_turn(of, turns, RATIOS)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 16384])
    parser.add_argument("--bits", type=int, nargs="+", default=[4, 2])
    parser.add_argument("--turns", type=int, default=31)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--write", action="store_true", help=f"keep the run in benchmarks/results/{RESULT}")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    rows = []
    for name, heads in QUERY_HEADS.items():
        for count in asked.tokens:
            for bits in asked.bits:
                run = measure(heads, count, bits, asked.turns)
                rows.append({"heads": name, "tokens": count, "bits": bits, **run})
                show(run, f"{name}, {count} tokens, {bits} bit: ")
    if asked.write:
        keep(RESULT, {"kv_heads": KV_HEADS, "head_dim": CHANNELS, "turns": asked.turns, "rows": rows})
