"""The attend graph in onnxruntime: against float64 attention over the runtime's decoded tokens, and against a cache's decode
step."""

from dataclasses import dataclass

import pytest

pytest.importorskip("onnxruntime", reason="the extra `export` (onnxruntime) is not installed")

import numpy as np
import torch
from layer_walk import Tokens, feed
from onnx_graphs import (
    GEOMETRY,
    Graphs,
    arrays,
    block_of,
    decoded,
    measured,
    predicted,
    random_tokens,
    request,
    small_artifact,
)
from tolerances import FLOAT32_ATTENTION
from toy_artifact import toy_model

from calib.runtime import compress
from calib.runtime.rotation import Rotation
from calib.runtime.stages.codec.corrected import OVERFLOWED

pytestmark = pytest.mark.arithmetic

HEADS, CHANNELS, QUERIES = GEOMETRY.kv_heads, GEOMETRY.head_dim, 2 * GEOMETRY.kv_heads
ROTATION = Rotation(10000.0 ** -(torch.arange(CHANNELS // 2).double() / (CHANNELS // 2)))
PARTS = ("queries", "keys", "values")
CALIBRATED = {"statistics": "calibrated"}
CASES = {
    "kivi": ("kivi", {}),
    "kivi calibrated": ("kivi", {"bits": 3, **CALIBRATED}),
    "rtn": ("rtn", {}),
    "rtn calibrated": ("rtn", CALIBRATED),
    "zipcache, exact and two tiers": ("zipcache", {"tiers": [[16, 0.2], [4, 0.4], [2, 0.4]]}),
    "zipcache calibrated": ("zipcache", CALIBRATED),
    "mikv": ("mikv", {}),
    "csr": ("csr", {"pursuit": "orthogonal"}),
    "uniform": ("uniform", {}),
    "gear": ("gear", {}),
    "gear in blocks of one": ("gear", {"block": 1}),
    "gear paper": ("gear", {"variant": "paper"}),
    "gear calibrated": ("gear", CALIBRATED),
    "gear on kivi": ("gear", {"backbone": "kivi", "group": 16, "block": 32}),
    "klt": ("klt", {"size": True, "predict": True, "trellis": False}),
    "klt after RoPE": ("klt", {"rope": "after"}),
    "klt with a trellis": ("klt", {"size": True, "predict": True, "trellis": True}),
    "klt in tiers": ("klt", {"size": True, "predict": True, "trellis": False, "tiers": [[4, 0.3], [2, 0.7]]}),
    "zipcache corrected": (
        "zipcache",
        {**CALIBRATED, "corrections": {"outliers": 0.02, "rank": 2, "residual_bits": 2}},
    ),
}


@pytest.fixture(scope="module")
def artifact():
    return small_artifact()


def packed(found, tier, stream, count, batch):
    """Graph inputs for a tier's keys or values, and the decoded tokens, keys rotated to their positions."""
    prefix, shape = f"{tier.name}{stream.role}.", (batch, HEADS, count, CHANNELS)
    tokens = random_tokens(shape, len(prefix) + count)
    given = {f"{prefix}exact": tokens.numpy()}
    if stream.writer is not None:
        query = random_tokens((batch, QUERIES, 3, CHANNELS), 7)
        transform, numbers = measured(stream, tokens, query, False)
        told, _ = predicted(stream, tier.keys, random_tokens(shape, len(f"{tier.name}keys.") + count))
        block = block_of(stream, transform, tokens - told, False)
        fields = {name: part for name, part in arrays(block).items() if name in stream.writer.fields()}
        given = {prefix + name: part for name, part in (fields | numbers).items()}
        tokens = decoded(stream, transform, block) + told
    if found.layer.before_rope and stream.role == "keys":
        cos, sin = ROTATION.along(0, count, torch.device("cpu"))
        given |= {f"{prefix}cos": cos[None, None].numpy(), f"{prefix}sin": sin[None, None].numpy()}
        tokens = Rotation.rotated(tokens, cos, sin)
    return given, tokens


@pytest.mark.parametrize("case", CASES)
def test_attention_over_fields_is_attention_over_their_tokens(case, artifact):
    found, batch, rows = Graphs(request(*CASES[case], artifact)), 2, 3
    given, held = {}, {"keys": [], "values": []}
    for tier in found.layer.tiers:
        count = 2 * getattr(tier.keys.writer, "tokens", 32)
        for stream in (tier.keys, tier.values):
            own, tokens = packed(found, tier, stream, count, batch)
            given |= own
            held[stream.role].append(tokens)
    count = 0 if case == "rtn" else 5
    for role in ("keys", "values"):
        held[role].append(random_tokens((batch, HEADS, count, CHANNELS), 99))
        given[f"{role}.window"] = held[role][-1].numpy()
    keys, values = (torch.cat(held[role], 2).double().repeat_interleave(2, 1) for role in ("keys", "values"))
    query = random_tokens((batch, QUERIES, rows, CHANNELS), 1)
    mask = torch.rand(batch, rows, keys.shape[2], generator=torch.Generator().manual_seed(2)) < 0.7
    mask[0, 0] = False  # a query row that sees no token
    found_now = found("attend", query=query.numpy(), mask=mask.numpy(), **given)

    scores = (query.double() @ keys.mT * CHANNELS**-0.5).masked_fill(~mask[:, None], -torch.inf)
    expected = (scores.softmax(-1).nan_to_num() @ values).numpy()
    np.testing.assert_allclose(found_now["output"], expected, rtol=0, atol=FLOAT32_ATTENTION * np.abs(expected).max())
    np.testing.assert_allclose(found_now["lse"], scores.logsumexp(-1).numpy(), rtol=FLOAT32_ATTENTION, atol=1e-5)


@pytest.mark.parametrize("case", ["kivi", "zipcache calibrated", "csr", "gear", "gear calibrated"])
def test_a_tier_may_be_empty(case, artifact):
    """A cache begins with a window only, or with a prompt and no later block: the graph takes tiers of 0 tokens."""
    found = Graphs(request(*CASES[case], artifact))
    query, window = random_tokens((2, QUERIES, 1, CHANNELS), 1), random_tokens((2, 2 * HEADS, 7, CHANNELS), 2)
    keys, values = window.split(HEADS, 1)
    given = {"query": query, "keys.window": keys, "values.window": values, "mask": torch.ones(2, 1, 7).bool()}
    given = {name: part.numpy() for name, part in given.items()}
    for at, tier in enumerate(found.layer.tiers):
        for stream in (tier.keys, tier.values):
            of_one, _ = packed(found, tier, stream, getattr(tier.keys.writer, "tokens", 32), 2)
            fields = stream.writer.fields()
            for name, part in of_one.items():
                field = fields.get(name.removeprefix(f"{tier.name}{stream.role}."))
                if field is not None and field.tokens_per_row is None:
                    # A field of a whole segment keeps its row; in the first tier it has no outliers.
                    part = part[..., :0] if "outliers" in name and at == 0 else part
                else:
                    part = part[:, :, :0] if part.shape[2] > 1 or field is not None else part
                given[name] = part
    expected = torch.nn.functional.scaled_dot_product_attention(query, keys, values, enable_gqa=True).numpy()
    np.testing.assert_allclose(found("attend", **given)["output"], expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@dataclass
class Step:
    """The decode step of token number `tokens` after a prompt of `prompt` tokens. `keys` and `values`: tokens in each tier, in
    order; the other tokens are exact. `tolerance` is larger where float16 factors depend on the order of sums."""

    method: str
    options: dict
    prompt: int
    tokens: int
    keys: list
    values: list
    tolerance: float = FLOAT32_ATTENTION


STEPS = {
    "kivi": Step("kivi", {"group": 8, "residual": 16}, 75, 76, [64], [59]),
    "rtn calibrated": Step("rtn", CALIBRATED, 20, 24, [23], [23]),
    "gear calibrated": Step("gear", CALIBRATED, 45, 92, [45, 40], [45, 40], 1e-4),
    "gear paper": Step("gear", {"variant": "paper"}, 45, 70, [45, 20], [45, 20], 1e-4),
    "csr": Step("csr", {}, 100, 101, [36], [36], 1e-3),
    "klt": Step("klt", {"sinks": 0, "window": 16, "block": 8, "trellis": True}, 60, 74, [52], [52]),
}


@pytest.mark.parametrize("case", STEPS)
def test_a_step_of_a_cache_is_the_graphs(case, artifact):
    step, model = STEPS[case], toy_model(head_dim=CHANNELS)
    rows = [Tokens.random(model, step.tokens, seed) for seed in range(2)]
    fitted = artifact if step.method in ("csr", "klt") or step.options == CALIBRATED else None
    with compress(model, step.method, fitted, seed=3, **step.options) as cache:
        feed(cache, [row[: step.prompt] for row in rows])
        for at in range(step.prompt, step.tokens):
            outputs = feed(cache, [row[at : at + 1] for row in rows])
    for layer in range(2):
        found, given = Graphs(request(step.method, step.options, fitted), layer), {}
        query, keys, values = (torch.stack([getattr(row, part)[layer] for row in rows]) for part in PARTS)
        for role, every, counts in (("keys", keys, step.keys), ("values", values, step.values)):
            *of_tiers, recent = every.split([*counts, step.tokens - sum(counts)], 2)
            given[f"{role}.window"] = recent.numpy()
            for tier, tokens in zip(found.layer.tiers, of_tiers, strict=True):
                name = f"{tier.name}{role}."
                if found.layer.before_rope and role == "keys":
                    cos, sin = ROTATION.along(0, tokens.shape[2], torch.device("cpu"))
                    given |= {f"{name}cos": cos[None, None].numpy(), f"{name}sin": sin[None, None].numpy()}
                    tokens = Rotation.rotated(tokens, cos, -sin)
                own = {} if role == "keys" or tier.values.predicted is None else tier.values.predicted.fields()
                fields = found.run(
                    f"{name}encode", {role: tokens.numpy()} | {part: given[tier.name + part] for part in own}
                )
                given |= {name + field: part for field, part in fields.items() if field != OVERFLOWED}
        mask = np.ones((2, 1, step.tokens), np.bool_)
        output = found("attend", query=query[:, :, -1:].numpy(), mask=mask, **given)["output"]
        expected = torch.stack(outputs[layer]).numpy()
        np.testing.assert_allclose(output, expected, rtol=0, atol=step.tolerance * np.abs(expected).max())
