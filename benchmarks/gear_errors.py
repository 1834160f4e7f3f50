"""Measures the errors of keys, values and attention with GEAR's corrections, for each row of its table, on one prompt.

    python -m benchmarks.gear_errors [--config eval/gear.yaml] [--lines 60] [--write]

The prompt's keys and values are encoded once as one segment, like a prompt, and once in blocks, like tokens after it. Errors are
relative (Frobenius norms) over all layers and heads: of keys, of values, and of the attention output of the prompt's last 16
queries over them.
"""

import argparse
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AutoTokenizer
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from benchmarks.protocol import keep, load
from calib.documents.generators import retrieval_cases
from calib.evaluate.entries import MethodEntry
from calib.evaluate.loaded import read_artifact
from calib.evaluate.request_files import read_request
from calib.runtime import Artifact
from calib.runtime.attention import exact_attention
from calib.runtime.logits import Logits
from calib.runtime.methods import Geometry
from calib.runtime.methods.gear import Gear
from calib.runtime.stages.codec import Corrected
from calib.runtime.stages.codec.corrected import OVERFLOWED
from calib.runtime.stages.contract import Codec

RESULT = "gear_errors.json"
QUERIES = 16
NAME = "calib_watched"
Layers = list[tuple[Tensor, Tensor, Tensor, float]]


def layers_of(model: Any, ids: Tensor) -> Layers:
    """Returns queries, keys, values and the softmax scale of every layer for the prompt `ids [1, T]`."""
    found: Layers = []

    def watched(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, scaling: float, **_: Any) -> Any:
        found.append((q, k, v, scaling))
        return exact_attention(q, k, v, None, Logits(scaling)).transpose(1, 2).contiguous(), None

    AttentionInterface.register(NAME, watched)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    model.set_attn_implementation(NAME)
    with torch.no_grad():
        model(ids)
    return found


def decoded(codec: Codec, x: Tensor, step: int, layer: int) -> tuple[Tensor, int]:
    """Returns `x [1, kv_heads, T, D]` after encoding and decoding segments of `step` tokens, and the number of overflowed outliers.

    Overflowed outliers are beyond a threshold, but all slots are used. Tokens of a shorter last segment are exact.
    """
    if isinstance(codec, Corrected):
        codec = codec.with_seed(0, layer)
    parts, overflowed_outliers = [], 0
    for part in x.split(step, 2):
        if part.shape[2] == step:
            block = codec.encode(part)
            overflowed_outliers += int(block[OVERFLOWED].sum()) if OVERFLOWED in block else 0
            part = codec.decode(block, part.shape[3])
        parts.append(part)
    return torch.cat(parts, 2), overflowed_outliers


def output(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Returns the causal attention output of the last `QUERIES` rows."""
    group, tokens = query.shape[1] // keys.shape[1], keys.shape[2]
    keys, values = (x.repeat_interleave(group, 1) for x in (keys, values))
    later = torch.arange(tokens) > torch.arange(tokens - QUERIES, tokens)[:, None]
    scores = (query[:, :, -QUERIES:] @ keys.mT * scale).masked_fill(later, float("-inf"))
    return scores.softmax(-1) @ values


def errors(method: Gear, layers: Layers, geometry: Geometry, artifact: Artifact | None) -> dict[str, dict[str, float]]:
    """Returns the relative errors as one segment and as blocks; `overflow`: share of entries beyond a threshold without a slot."""
    found = {}
    for name, position in (("prompt", 0), ("blocks", -1)):
        sums: dict[str, list[float]] = {part: [0.0, 0.0] for part in ("keys", "values", "output")}
        overflow, entries = 0, 0
        for number, (query, keys, values, scale) in enumerate(layers):
            plan: Any = method.plan(number, geometry, artifact)
            whole = keys.shape[2] // plan.tiering.multiple_of * plan.tiering.multiple_of
            step = whole if name == "prompt" else plan.tiering.block
            tier, close = plan.tiers[position], []
            for stages, x in ((tier.keys, keys), (tier.values, values)):
                after, overflowed_outliers = decoded(stages.codec, x, step, number)
                close.append(after)
                overflow, entries = overflow + overflowed_outliers, entries + x.numel()
            after_keys, after_values = close
            exact = (keys, values, output(query, keys, values, scale))
            stored = (after_keys, after_values, output(query, after_keys, after_values, scale))
            for part, x, y in zip(sums, exact, stored, strict=True):
                sums[part][0] += float((x - y).square().sum())
                sums[part][1] += float(x.square().sum())
        found[name] = {part: round((error / size) ** 0.5, 5) for part, (error, size) in sums.items()}
        found[name]["overflow"] = round(overflow / entries, 5)
    return found


def plain(entry: MethodEntry, title: str) -> Gear | None:
    """Returns the row's method if it is one of GEAR's, else None."""
    method = entry.build(title)
    return method if isinstance(method, Gear) else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="eval/gear.yaml")
    parser.add_argument("--lines", type=int, default=60)
    parser.add_argument("--write", action="store_true", help=f"write {RESULT} beside the other runs")
    asked = parser.parse_args()
    request = read_request([asked.config], [])
    artifact, _ = read_artifact(request.artifact)
    model, tokenizer = load(request.model), AutoTokenizer.from_pretrained(request.model)
    [case] = retrieval_cases(request.seed, 1, asked.lines)
    ids = tokenizer(case.prompt, return_tensors="pt")["input_ids"]
    layers, geometry, rows = layers_of(model, ids), Geometry.of(model.config), {}
    print(f"{ids.shape[1]} tokens; keys, values, output, overflow: as one segment, then in blocks")
    for entry in request.methods:
        method = plain(entry, request.titles()[0])
        if method is not None:
            rows[entry.label] = errors(method, layers, geometry, artifact if entry.uses_artifact else None)
            print(*(f"{error:.4f}" for part in rows[entry.label].values() for error in part.values()), entry.label)
    if asked.write:
        keep(RESULT, {"tokens": ids.shape[1], "queries": QUERIES, "rows": rows})


if __name__ == "__main__":
    main()
