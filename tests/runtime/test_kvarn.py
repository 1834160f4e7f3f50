"""KVarN against its paper in float64: the rotation, the scales of both axes, codes and scales as they are stored, and what stays
exact."""

import math
import re
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from layer_walk import Tokens, feed
from tolerances import FLOAT32_FOLD
from toy_models import random_model

from calib.runtime import compress
from calib.runtime.methods import build
from calib.runtime.methods.per_stream import of_streams
from calib.runtime.stages.codec import DualScale
from calib.runtime.stages.equal_variance import row_scales
from calib.runtime.stages.transform import Orthogonal

# The share of values whose step or least value float32 and float64 may round to different neighbours of 16 bits.
ODD_SCALES = 0.01


def hadamard(channels: int) -> np.ndarray:
    """Blocks whose size is the largest power of two that divides `channels`; entry (i, j) is -1 to the number of bits that i and j
    share, divided by the size's root."""
    size = channels & -channels
    index = np.arange(size)
    shared = (index[:, None] & index)[..., None] >> np.arange(10) & 1
    return np.kron(np.eye(channels // size), (-1.0) ** shared.sum(-1) / math.sqrt(size))


def normalised(x: np.ndarray, rounds: int) -> tuple[np.ndarray, np.ndarray]:
    """Scales of the columns and of the rows of one tile: logarithms summed over rounds, columns first, up to the evenest round."""

    def imbalance(y: np.ndarray) -> float:
        return sum(std.max() / max(std.min(), 1e-8) for std in (y.std(0, ddof=1), y.std(1, ddof=1)))

    column, row = np.zeros((1, x.shape[1])), np.zeros((x.shape[0], 1))
    best, least = (column, row), imbalance(x)
    for _ in range(rounds):
        std = (x / np.exp(column + row)).std(0, ddof=1, keepdims=True)
        column = np.clip(column + np.log(np.clip(std, 1e-3, 1e3)), -0.3, 10)
        std = (x / np.exp(column + row)).std(1, ddof=1, keepdims=True)
        row = np.clip(row + np.log(np.clip(std, 1e-3, 1e3)), -0.3, 10)
        found = imbalance(x / np.exp(column + row))
        if found <= least:
            best, least = (column, row), found
    return np.exp(best[0]), np.exp(best[1])


def same_but_for_a_factor(found: np.ndarray, wanted: np.ndarray) -> float:
    """How far two scales of positive numbers are from being multiples of each other.

    Rounds that are nearly the best differ by a factor that one axis has more of and the other less, which changes nothing.
    """
    ratio = np.log(found.flatten() / wanted.flatten())
    return float(abs(ratio - np.median(ratio)).max())


def quantised(x: np.ndarray, column: np.ndarray, bits: int, rounds: int) -> np.ndarray:
    """x^ of one tile by the scales of its columns, rounded along its rows with a step and a least value that include the row's
    scale and are stored in 16 bits."""
    _, row = normalised(x, rounds)
    even = x / column / row
    low, high = even.min(1, keepdims=True), even.max(1, keepdims=True)
    step, least = ((row * part).astype(np.float16).astype(np.float64) for part in ((high - low) / (2**bits - 1), low))
    codes = np.clip(np.floor((x / column - least) / step + 0.5), 0, 2**bits - 1)
    return (codes * step + least) * column


def uneven(rows: int, columns: int, magnitude: float, seed: int) -> torch.Tensor:
    """A matrix whose rows and columns have different magnitudes, one column a hundred times larger."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=draw) + 0.5 * torch.randn(rows, 1, generator=draw)
    x *= (torch.randn(rows, 1, generator=draw) + torch.randn(1, columns, generator=draw)).exp()
    x[:, 1] *= 100
    return x * magnitude


@pytest.mark.arithmetic
@pytest.mark.parametrize("channels", [1, 2, 15, 64, 80, 96, 128, 256])
def test_the_rotation_is_hadamards(channels: int):
    own = Orthogonal.hadamard(channels)
    matrix = own.matrix.tensor.double()
    assert float((matrix - torch.from_numpy(hadamard(channels))).abs().max()) < 2**-22
    assert float((matrix @ matrix.mT - torch.eye(channels)).abs().max()) < 2**-18
    assert Orthogonal.hadamard(channels).matrix is own.matrix


@pytest.mark.arithmetic
@pytest.mark.parametrize("magnitude", [0.03, 1.0, 40.0, 1e5])
@pytest.mark.parametrize(("rows", "columns"), [(128, 64), (16, 80), (2, 3)])
def test_scales_are_the_papers(rows: int, columns: int, magnitude: float):
    """Also where scales are clipped to their limits and a later round is worse."""
    for seed in range(5):
        x = uneven(rows, columns, magnitude, seed)
        for rounds in (0, 1, 4, 16):
            scales, _ = normalised(x.double().numpy(), rounds)
            assert same_but_for_a_factor(row_scales(x.mT, rounds).numpy(), scales) < 1e-5


@pytest.mark.arithmetic
def test_where_everything_is_small_no_scale_differs_from_another():
    """All scales are at their lower limit, so that all rounds give the same."""
    found = row_scales(uneven(16, 80, 1e-6, 0), 16)
    assert bool((found == found[0]).all())


@pytest.mark.arithmetic
def test_sixteen_rounds_make_all_tokens_and_channels_vary_alike():
    x = uneven(128, 64, 1e3, 0).double()
    even = x / row_scales(x, 16)
    even /= even.std(0)
    assert float(x.std(1).max() / x.std(1).min()) > 30
    assert float(even.std(1).max() / even.std(1).min()) < 1.001


@pytest.mark.arithmetic
def test_a_tiles_bits_do_not_depend_on_what_is_encoded_with_it():
    x = torch.stack([torch.stack([uneven(512, 96, 1.0, 2 * row + head) for head in range(2)]) for row in range(3)])
    for codec in (DualScale(4, "channels", 128), DualScale(2, "tokens", 128)):
        together = codec.encode(x)
        for tile in range(4):
            alone = codec.encode(x[1:2, 1:, 128 * tile : 128 * tile + 128])
            for name, part in alone.items():
                rows = part.shape[2]
                assert torch.equal(part[0, 0], together[name][1, 1, tile * rows : tile * rows + rows])


@pytest.mark.parametrize(
    ("options", "model_name"),
    [
        ({"tile": 16, "sinks": 4}, "llama"),
        ({"tile": 24, "sinks": 0, "bits": 2, "iterations": 3}, "llama"),
        ({"tile": 32, "sinks": 9, "bits": {"keys": 3, "values": 8}}, "llama-64"),
    ],
)
def test_what_is_stored_is_the_papers_algorithm(options: dict[str, Any], model_name: str):
    """Every tile of a generation against the algorithm on the model's keys and values; sinks and the incomplete tile are exact."""
    model = random_model(model_name)
    given: list[list[torch.Tensor]] = [[], []]
    ids = torch.randint(1, 100, (1, 50), generator=torch.Generator().manual_seed(1))
    with compress(model, "kvarn", **options) as cache:
        layer = cache.compressed[0]
        update = layer.update

        def listening(keys: torch.Tensor, values: torch.Tensor, *rest: object):
            given[0].append(keys)
            given[1].append(values)
            return update(keys, values, *rest)

        layer.update = listening
        model.generate(ids, past_key_values=cache, max_new_tokens=60, min_new_tokens=60, do_sample=False)
        held = oracle.held_tokens(layer, 0)
        (tier,), pages = layer.store.tiers, layer.store.sequences.tables[0].rows[0]
    tile, sinks, rounds = options["tile"], options["sinks"], options.get("iterations", 16)
    bits = of_streams("bits", options.get("bits", {"keys": 4, "values": 2}))
    for role, found, tokens, own in zip(("keys", "values"), held[:2], given, bits, strict=True):
        scales = tier.pool.tensors[f"{role}.scales"][pages].double().numpy()
        x = torch.cat(tokens, 2)[0].double().numpy()
        tiles = (x.shape[1] - sinks) // tile
        assert tiles > 1 and torch.equal(held.positions[0, tiles * tile :], exact_positions(x.shape[1], sinks, tile))
        matrix, odd = hadamard(x.shape[2]), []
        for head, of_head in enumerate(x):
            exact = found[head, tiles * tile :].numpy()
            assert (exact == of_head[exact_positions(len(of_head), sinks, tile).numpy()]).all()
            for number in range(tiles):
                rotated = of_head[sinks + number * tile : sinks + (number + 1) * tile] @ matrix.T
                own_tile = rotated.T if role == "keys" else rotated
                column = scales[number, head].reshape(1, -1)
                assert same_but_for_a_factor(column, normalised(own_tile, rounds)[0]) < 2**-10
                wanted = quantised(own_tile, column, own, rounds)
                wanted = wanted.T if role == "keys" else wanted
                off = abs(found[head, number * tile : (number + 1) * tile].numpy() @ matrix.T - wanted)
                odd.append((off > FLOAT32_FOLD * abs(wanted).max()).mean())
        assert np.mean(odd) <= ODD_SCALES


def exact_positions(length: int, sinks: int, tile: int) -> torch.Tensor:
    """Positions of the sinks, and of the tokens of the incomplete tile."""
    return torch.tensor([*range(sinks), *range(sinks + (length - sinks) // tile * tile, length)])


def test_the_default_keeps_a_first_tile_exact_and_has_the_bits_of_the_release():
    """Bytes of a page of a head of 128 channels: keys 8,192 of codes, 512 of steps and least values, 256 of scales; values 4,096,
    512 and 256."""
    model = random_model("llama", torch.bfloat16, head_dim=128)
    with compress(model, "kvarn") as cache, torch.no_grad():
        model(torch.arange(700)[None] % 90, past_key_values=cache)
        (tier,) = cache.compressed[0].store.tiers
        bytes_of = {name: part[0, 0].nbytes for name, part in tier.pool.tensors.items()}
        assert cache.compressed[0].store.sequences.held(0, 700) == [512]
        assert cache.memory().marginal_bits == 3.375
    assert bytes_of == {
        "keys.words": 8192, "keys.parameters": 512, "keys.scales": 256,
        "values.words": 4096, "values.parameters": 512, "values.scales": 256,
    }  # fmt: skip


@pytest.mark.full
def test_rows_of_a_batch_store_what_each_stores_alone():
    """Longer than what is encoded at once: pieces end where tiles do."""
    model = random_model("llama", num_hidden_layers=1)
    rows = [Tokens.random(model, count, seed=count) for count in (1500, 1530, 1500)]
    together = compress(model, "kvarn", tile=24, sinks=5)
    together.release()
    feed(together, rows)
    for number, row in enumerate(rows):
        alone = compress(model, "kvarn", tile=24, sinks=5)
        alone.release()
        for part in (row[:700], row[700:701], row[701:]):
            feed(alone, [part])
        found, wanted = (oracle.held_tokens(cache.compressed[0], at) for cache, at in ((together, number), (alone, 0)))
        assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers_beyond_16_bits_are_kept_in_32(dtype: torch.dtype):
    codec = DualScale(4, "channels", 8)
    x = torch.full((1, 1, 8, 16), 6e4).to(dtype)
    assert codec.fp32_params(x) and not codec.fp32_params(x / 100)
    block = codec.encode(x)
    assert block["parameters"].dtype == block["scales"].dtype == torch.float32
    assert torch.allclose(codec.decode(block, 16), x.float(), rtol=0.01)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_tokens_that_only_their_rotation_takes_beyond_16_bits(dtype: torch.dtype):
    """Of 32 equal values Hadamard's matrix makes one that is larger by the root of 32."""
    model = random_model("llama", dtype, num_hidden_layers=1)
    tokens = Tokens.random(model, 16, seed=0)
    tokens.keys, tokens.values = (torch.full_like(part, 2e4) for part in (tokens.keys, tokens.values))
    with compress(model, "kvarn", bits=8, tile=8, sinks=0, iterations=0) as cache:
        feed(cache, [tokens])
        found = oracle.held_tokens(cache.compressed[0], 0)
    for held, given in zip(found[:2], (tokens.keys, tokens.values), strict=True):
        assert torch.allclose(held, given[0].double(), rtol=0.01)


def test_a_tile_of_zeros_comes_back_as_zeros():
    for codec in (DualScale(2, "channels", 8), DualScale(2, "tokens", 8)):
        x = torch.zeros(1, 1, 16, 16)
        x[0, 0, 8:] = torch.randn(8, 16)
        found = codec.decode(codec.encode(x), 16)
        assert bool((found[:, :, :8] == 0).all()) and bool(found[:, :, 8:].any())


def test_tokens_that_make_no_whole_tile_are_refused():
    with pytest.raises(ValueError, match="tiles of 8 tokens do not divide 12 tokens; give whole tiles"):
        DualScale(2, "tokens", 8).encode(torch.zeros(1, 1, 12, 16))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits": 0}, "bits must be a whole number 1 ... 8, got 0"),
        ({"bits": {"keys": 4, "values": 2.5}}, "bits of values must be a whole number 1 ... 8, got 2.5"),
        ({"tile": 1}, "tile must be a whole number of tokens, 2 ... 512, got 1; 128 is usual"),
        ({"tile": 1024}, "tile must be a whole number, at most 512, got 1024; 128 is usual"),
        ({"iterations": -1}, "iterations must be a whole number 0 ... 1000, got -1; 16 is usual"),
        ({"sinks": -1}, "sinks must be a whole number of tokens, at least 0, got -1; 128 is usual"),
        ({"keys_bits": 4}, "unknown option 'keys_bits' of method 'kvarn' (did you mean 'bits'?)"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, object], message: str):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        build("kvarn", options)
