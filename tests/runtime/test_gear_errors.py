"""Errors of GEAR's parts on keys and values like a trained model's: each part lowers them, and L is near its optimum."""

from typing import Any

import numpy as np
import pytest
import torch
from gear.oracle import Spec, rank_of
from gear.samples import real_like, spans
from layer_walk import Tokens, feed
from toy_models import random_model

from calib.runtime import compress

pytestmark = pytest.mark.arithmetic

HEADS, CHANNELS = 2, 64
SEEDS = range(20)


def held(options: dict[str, Any], keys: np.ndarray, values: np.ndarray, sizes: list[int]) -> list[np.ndarray]:
    """x^ of both streams `[kv_heads, encoded, D]` after tokens `[kv_heads, n, D]` were fed in forwards of these sizes."""
    model = random_model("llama-64", num_hidden_layers=1)
    cache, at = compress(model, "gear", **options), 0
    cache.release()
    streams = [torch.from_numpy(part)[None] for part in (keys, values)]
    for size in sizes:
        new = [part[:, :, at : at + size] for part in streams]
        feed(cache, [Tokens(torch.zeros_like(new[0]), *new)])
        at += size
    return [torch.cat(part, 1).double().numpy() for part in zip(*cache.compressed[0].store.decoded(0), strict=True)]


def sample(seed: int, tokens: int) -> list[np.ndarray]:
    return [real_like((HEADS, tokens, CHANNELS), 2 * seed + stream) for stream in range(2)]


@pytest.mark.full
@pytest.mark.parametrize(
    "options",
    [{}, {"per_head": True}, {"bits": 2}, {"backbone": "channel"}, {"backbone": "kivi"}, {"variant": "paper"}],
    ids=str,
)
def test_outliers_lower_the_error_and_low_rank_lowers_it_further(options):
    """Relative Frobenius error of x^, prompts of 200 ... 1000 tokens and blocks after them, on every seed."""
    for seed in SEEDS:
        sizes = [200 + 40 * seed, 128]
        tokens, errors = sample(seed, sum(sizes)), []
        for parts in ({"outliers": 0.0, "rank": 0}, {"rank": 0}, {}):
            found = held(options | parts, *tokens, sizes)
            pairs = [(x[:, : y.shape[1]], y) for x, y in zip(tokens, found, strict=True)]
            errors.append([np.linalg.norm(x - y) / np.linalg.norm(x) for x, y in pairs])
        for stream, (quantised, outliers, full) in enumerate(zip(*errors, strict=True)):
            assert quantised > outliers > full > 0, (seed, stream, errors)


def excess(options: dict[str, Any], seed: int, sizes: list[int]) -> tuple[list[float], list[float]]:
    """||R - L|| over that of the best matrix of L's rank (by SVD) for every matrix of both streams, those of prompts and those of
    blocks; R is the backbone's residual."""
    tokens, spec = sample(seed, sum(sizes)), Spec.of("gear", outliers=0.0, **options)
    plain = held({"outliers": 0.0, "rank": 0} | options | {"rank": 0, "decode_rank": 0}, *tokens, sizes)
    full, found = held({"outliers": 0.0} | options, *tokens, sizes), ([], [])
    for x, backbone, both in zip(tokens, plain, full, strict=True):
        for number, (start, stop) in enumerate(spans(sizes, spec)):
            residual, low_rank = (part[:, start:stop] - backbone[:, start:stop] for part in (x, both))
            if spec.variant == "paper":
                residual, low_rank = (
                    part.transpose(1, 0, 2).reshape(1, stop - start, -1) for part in (residual, low_rank)
                )
            rank = spec.decode_rank if number else spec.rank
            rank = rank_of(rank, *residual.shape[1:])
            left = np.linalg.svd(residual, compute_uv=False)[:, rank:]
            error, least = np.linalg.norm(residual - low_rank, axis=(1, 2)), np.linalg.norm(left, axis=1)
            found[number > 0].extend((error / least).tolist())
    return found


KIVI = {"backbone": "kivi"}


@pytest.mark.full
@pytest.mark.parametrize("bits", [4, 2])
@pytest.mark.parametrize(
    "options",
    [
        {"block": 20},
        {"block": 64},
        {"block": 20, "group": 4, **KIVI},
        {"block": 64, **KIVI},
        {"block": 20, "variant": "paper"},
        {"block": 64, "variant": "paper"},
    ],
    ids=str,
)
def test_low_rank_is_near_its_optimum_and_never_below(options, bits):
    """Prompts of 200 ... 1000 tokens and blocks after them, within 5 % on every seed."""
    for seed in SEEDS:
        first, blocks = excess({"bits": bits, **options}, seed, [200 + 40 * seed, 2 * options["block"]])
        assert len(first) >= 2 and len(blocks) >= 4
        assert all(1 - 1e-6 <= ratio <= 1.05 for ratio in first + blocks), (seed, first, blocks)
