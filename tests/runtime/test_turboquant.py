"""TurboQuant against its paper in float64: the table, the error its first theorem gives, codes and norms as they are stored."""

import numpy as np
import oracle
import pytest
import torch
from tolerances import FLOAT32_FOLD, ODD_CODES
from toy_models import random_model

from calib.runtime import compress
from calib.runtime.methods import Geometry, build
from calib.runtime.stages.codec import Direction
from calib.runtime.stages.transform import Orthogonal

CHANNELS = 64


def density(t: np.ndarray, channels: int) -> np.ndarray:
    """The density of a coordinate of a uniformly random unit vector (lemma 1), without its constant."""
    return np.clip(1 - t**2, 0, None) ** ((channels - 3) / 2)


@pytest.mark.arithmetic
@pytest.mark.parametrize("channels", [16, 64, 128])
@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_every_entry_is_the_mean_of_the_coordinates_nearest_to_it(bits: int, channels: int):
    """The condition of a Lloyd-Max quantiser (equation 4), by sums over a grid of t with steps of 5e-6."""
    table = Direction.uniform(channels, bits).codebook.table[0].double().numpy()
    t = np.linspace(-1, 1, 400_001)
    weight, nearest = density(t, channels), abs(t[:, None] - table).argmin(1)
    means = np.bincount(nearest, weight * t) / np.bincount(nearest, weight)
    np.testing.assert_allclose(table, means, atol=5e-6)
    assert (table == -table[::-1]).all()


@pytest.mark.arithmetic
@pytest.mark.parametrize(("bits", "distortion"), [(1, 0.3634), (2, 0.1175), (3, 0.03454), (4, 0.009497)])
def test_the_error_is_that_of_the_papers_first_theorem(bits: int, distortion: float):
    """Of unit vectors in high dimension, whatever they are: here each has one large channel, which a rotation spreads.

    The theorem prints 0.36, 0.117, 0.03 and 0.009: the distortions of a Gaussian's best tables (Max, 1960), here with all digits.
    """
    x = torch.randn(1, 1, 40, 128, generator=torch.Generator().manual_seed(0))
    x[..., 5] *= 30
    x /= x.norm(dim=-1, keepdim=True)
    codec, off = Direction.uniform(128, bits), []
    for seed in range(100):  # the theorem's mean is over rotations
        rotation = Orthogonal.drawn(128, seed)
        found = rotation.inverse(codec.decode(codec.encode(rotation.forward(x)), 128))
        off.append(float((found - x).square().sum(-1).mean()))
    assert abs(np.mean(off) - distortion) < 0.04 * distortion


@pytest.mark.arithmetic
@pytest.mark.parametrize("channels", [2, 16, 64, 96, 256])
def test_the_matrix_is_orthogonal_and_the_same_for_everyone(channels: int):
    own, other = Orthogonal.drawn(channels, 1), Orthogonal.drawn(channels, 2)
    matrix = own.matrix.tensor.double()
    assert float((matrix @ matrix.mT - torch.eye(channels)).abs().max()) < 2**-20
    assert Orthogonal.drawn(channels, 1).matrix is own.matrix
    assert not torch.equal(matrix, other.matrix.tensor)


@pytest.mark.arithmetic
def test_a_tokens_codes_do_not_depend_on_what_is_encoded_with_it():
    x = torch.randn(3, 2, 37, 256, generator=torch.Generator().manual_seed(4))
    rotation, codec = Orthogonal.drawn(256, 0), Direction.uniform(256, 8)
    together = codec.encode(rotation.forward(x))
    for token in (0, 17, 36):
        alone = codec.encode(rotation.forward(x[1:2, :, token : token + 1]))
        assert all(torch.equal(alone[name][0, :, 0], together[name][1, :, token]) for name in alone)


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
def test_what_is_stored_is_the_papers_algorithm(bits: int):
    """Every token of a generation against algorithm 1 on the keys and values that the model computed."""
    model = random_model("llama")
    given: dict[str, list[torch.Tensor]] = {"k_proj": [], "v_proj": []}
    ids = torch.randint(1, 100, (1, 50), generator=torch.Generator().manual_seed(1))
    with compress(model, "turboquant", bits=bits) as cache:
        layer = cache.compressed[0]
        update = layer.update

        def listening(keys: torch.Tensor, values: torch.Tensor, *rest: object):
            given["k_proj"].append(keys)
            given["v_proj"].append(values)
            return update(keys, values, *rest)

        layer.update = listening
        model.generate(ids, past_key_values=cache, max_new_tokens=20, min_new_tokens=20, do_sample=False)
        held = oracle.held_tokens(layer, 0)
        streams = layer.store.streams
    for stream, tokens, found in zip(streams, given.values(), held[:2], strict=True):
        x = torch.cat(tokens, 2)[0].double().numpy()
        matrix = stream.plan.transform.matrix.tensor.double().numpy()
        table = stream.plan.codec.codebook.table[0].double().numpy()
        norm = np.linalg.norm(x, axis=-1, keepdims=True).astype(np.float16).astype(np.float64)
        expected = table[abs((x @ matrix.T / norm)[..., None] - table).argmin(-1)] * norm @ matrix
        # A coordinate that float32 puts on the other side of the middle of two entries takes the other one.
        off = abs(found.numpy() - expected).max(-1) > FLOAT32_FOLD * norm[..., 0]
        assert found.shape == expected.shape and off.mean() <= ODD_CODES * CHANNELS


def test_a_token_of_zeros_comes_back_as_zeros():
    codec = Direction.uniform(CHANNELS, 2)
    x = torch.zeros(1, 1, 3, CHANNELS)
    x[0, 0, 1] = 1
    found = codec.decode(codec.encode(x), CHANNELS)
    assert bool((found[:, :, [0, 2]] == 0).all()) and bool((found[:, :, 1] != 0).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_norm_beyond_16_bits_is_kept_in_32(dtype: torch.dtype):
    codec = Direction.uniform(CHANNELS, 4)
    x = torch.full((1, 1, 2, CHANNELS), 6e4).to(dtype)
    assert codec.fp32_params(x) and not codec.fp32_params(x / 100)
    block = codec.encode(x)
    assert block["norms"].dtype == torch.float32
    assert torch.allclose(codec.decode(block, CHANNELS), x.float(), rtol=0.2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits": 0}, "bits must be a whole number 1 ... 8, got 0"),
        ({"bits": 2.5}, "bits must be a whole number 1 ... 8, got 2.5"),
        ({"residual": -1}, "residual must be a whole number of tokens, at least 0, got -1"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, object], message: str):
    with pytest.raises(ValueError, match=message.replace(".", r"\.")):
        build("turboquant", options)


def test_heads_of_one_channel_are_refused():
    refusal = "^a direction has at least 2 channels, got head_dim 1; use a method with ranges, such as rtn$"
    with pytest.raises(ValueError, match=refusal):
        build("turboquant", {}).plan(0, Geometry(1, 1, 1), None)
    assert build("turboquant", {}).plan(0, Geometry(1, 1, 2), None)
