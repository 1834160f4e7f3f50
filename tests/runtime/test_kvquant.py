"""KVQuant against its paper in float64: what is stored of a generation, the outliers' rule, and what is refused."""

import numpy as np
import oracle
import pytest
import torch
from cases import calibrated_artifact
from tolerances import FLOAT32_FOLD, ODD_CODES
from toy_models import random_model

from calib.runtime import compress
from calib.runtime.methods import Geometry, build
from calib.runtime.rotation import Rotation
from calib.runtime.stages.codec import Codebook, TokenRange
from calib.runtime.stages.correction import Outliers

SINKS, PROMPT, NEW = 1, 50, 20
HALF = 2.0**-11  # what rounding to float16 loses of a number


def nearest(y: np.ndarray, levels: np.ndarray) -> np.ndarray:
    """The levels nearest to `y`."""
    return levels[abs(y[..., None] - levels).argmin(-1)]


def expected_keys(
    keys: np.ndarray, low: np.ndarray, high: np.ndarray, levels: np.ndarray, slots: int
) -> tuple[np.ndarray, int]:
    """x^ of keys before RoPE `[heads, tokens, channels]` by sections 3.1 to 3.4: of a token's values beyond their channel's range
    the farthest `slots` of all heads are exact; and the number of further ones."""
    centre, half = (high + low)[:, None] / 2, (high - low)[:, None] / 2
    y = (keys - centre) / half
    found, further = nearest(y, levels), 0
    for token in range(keys.shape[1]):
        beyond = np.argwhere(abs(y[:, token]) > 1)
        beyond = sorted(beyond.tolist(), key=lambda at: -abs(y[at[0], token, at[1]]))
        further += max(0, len(beyond) - slots)
        for head, channel in beyond[:slots]:
            found[head, token, channel] = y[head, token, channel]
    return found * half + centre, further


def expected_values(values: np.ndarray, levels: np.ndarray, each: int) -> np.ndarray:
    """The same sections of values: of a token the `each` largest and smallest are exact, and its range is that of the rest."""
    found = np.empty_like(values)
    for token in range(values.shape[1]):
        own = values[:, token].flatten()
        order = own.argsort()
        rest = order[each : len(order) - each]
        low, high = own[rest].min(), own[rest].max()
        centre, half = (np.float16(number).astype(np.float64) for number in ((high + low) / 2, (high - low) / 2))
        own[rest] = centre + half * nearest((own[rest] - centre) / half, levels)
        found[:, token] = own.reshape(values.shape[0], -1)
    return found


@pytest.mark.parametrize(("bits", "outliers"), [(4, 0.01), (3, 0.01), (2, 0.01), (4, 0)])
def test_what_is_stored_is_the_papers(bits: int, outliers: float):
    """Every token of a generation against the paper's sections on the keys and values that the model computed."""
    model = random_model("llama")
    artifact = calibrated_artifact(model)
    share = artifact.tensors["nuq.shares"].tolist().index(np.float32(outliers))
    given: list[list[torch.Tensor]] = [[], []]
    ids = torch.randint(1, 100, (1, PROMPT), generator=torch.Generator().manual_seed(1))
    with compress(model, "kvquant", artifact=artifact, bits=bits, outliers=outliers) as cache:
        layer = cache.compressed[1]
        update = layer.update

        def listening(keys: torch.Tensor, values: torch.Tensor, *rest: object):
            given[0].append(keys)
            given[1].append(values)
            return update(keys, values, *rest)

        layer.update = listening
        model.generate(ids, past_key_values=cache, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False)
        held = oracle.held_tokens(layer, 0)
        further = layer.store.overflowed_outliers()
    keys, values = (torch.cat(parts, 2)[0].double() for parts in given)
    heads, tokens, channels = keys.shape
    turn = Rotation.of(model, "")
    angles = torch.arange(tokens).double()[:, None] * turn.frequencies.double()
    cos, sin = (part.numpy() for part in (angles.cos(), angles.sin()))
    before, sinks = turned(keys.numpy(), cos, -sin), keys.numpy()[:, :SINKS]
    low, high = (artifact.tensors[f"keys.nuq.{end}"][1, ..., share].double().numpy() for end in ("low", "high"))
    table, rows = (
        artifact.tensors[f"{stream}.nuq.levels.{bits}"][1, share].double().numpy() for stream in ("keys", "values")
    )
    each = max(1, int(outliers / 2 * heads * channels)) if outliers else 0
    own, missed = expected_keys(before[:, SINKS:], low, high, table, 2 * each)
    assert further == (missed if outliers else 0)
    order = held.positions[0].argsort()
    for stream, paper, exact in (
        (held.keys, turned(own, cos[SINKS:], sin[SINKS:]), sinks),
        (held.values, expected_values(values.numpy()[:, SINKS:], rows, each), values.numpy()[:, :SINKS]),
    ):
        found = stream[:, order].numpy()
        assert found.shape[1] == tokens and np.array_equal(found[:, :SINKS], exact)
        # A value that float32 puts on the other side of the middle of two levels takes the other: with RoPE that is two channels.
        off = abs(found[:, SINKS:] - paper) > (FLOAT32_FOLD + HALF) * abs(paper).max()
        assert off.mean() <= 4 * ODD_CODES


def turned(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """`x [heads, tokens, channels]` rotated by RoPE: channels j and j + D/2 are one plane."""
    first, second = np.split(x, 2, -1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


@pytest.mark.arithmetic
def test_where_slots_are_few_the_farthest_outliers_get_them_and_the_others_are_counted():
    one = torch.ones(())
    outliers = Outliers(0.1, "channels", True, low=-one, high=one, farthest=True, heads=2)
    x = torch.full((1, 2, 3, 10), 0.5)
    x[0, 0, 0, 3], x[0, 1, 0, 7], x[0, 1, 0, 2] = 2.0, -4.0, 1.5  # two slots
    x[0, 1, 1, 9] = -1.01
    found = outliers.find(x)
    assert int(found.overflowed_outliers) == 1
    marked = outliers.cleared(torch.ones_like(x), found) == 0
    assert sorted(marked.nonzero().tolist()) == [[0, 0, 0, 3], [0, 1, 0, 7], [0, 1, 1, 9]]
    assert found.used.sum(-1).flatten().tolist() == [2, 1, 0]


@pytest.mark.arithmetic
@pytest.mark.parametrize("kind", ["constant", "zero", "tiny", "wide"])
def test_a_token_whose_range_rounds_away_or_is_beyond_16_bits(kind: str):
    codec = TokenRange(Codebook(torch.tensor([[-1.0, -0.25, 0.25, 1.0]])))
    x = torch.randn(1, 2, 4, 16, generator=torch.Generator().manual_seed(0))
    x = {"constant": torch.full_like(x, 3.0), "zero": x * 0, "tiny": x * 1e-9, "wide": x * 1e6}[kind]
    assert codec.fp32_params(x) == (kind == "wide")
    found = codec.decode(codec.encode(x), 16)
    assert bool(((found - x).abs() <= codec.error_bound(x)).all())
    assert kind not in ("constant", "zero") or torch.equal(found, x)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits": 5}, "bits must be 2, 3, 4, got 5; 4 is the default"),
        ({"bits": True}, "bits must be 2, 3, 4, got True"),
        ({"outliers": 1}, "outliers must be a share from 0 to below 1, got 1; 0.01 is the paper's"),
        ({"outliers": "1%"}, "outliers must be a share from 0 to below 1, got '1%'"),
        ({"sinks": -1}, "sinks must be a whole number of tokens, at least 0, got -1; 1 is the paper's"),
        ({"corrections": {"outliers": 0.02}}, "method 'kvquant' has options of its own"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, object], message: str):
    with pytest.raises(ValueError, match=message.replace(".", r"\.")):
        build("kvquant", options)


def test_an_artifact_without_levels_is_refused_with_the_option_to_fit_with():
    model = random_model("llama")
    geometry, artifact = Geometry.of(model.config), calibrated_artifact(model)
    with pytest.raises(ValueError, match=r"needs fitted levels: pass artifact=.* `calib fit --model.nuq \[0.01\]`"):
        build("kvquant", {}).plan(0, geometry, None)
    for share in (0.02, 1e-7):
        with pytest.raises(
            ValueError, match=rf"outliers={share:g}: the artifact has levels for 0, 0.01; use one of these, or fit with"
        ):
            build("kvquant", {"outliers": share}).plan(0, geometry, artifact)
    del artifact.tensors["nuq.shares"]
    with pytest.raises(
        ValueError, match=r"'nuq.shares', which is not in this artifact; .*`calib fit --model.nuq \[0.01\]`"
    ):
        build("kvquant", {}).plan(0, geometry, artifact)


@pytest.mark.parametrize("method", ["kvquant", "csr"])
def test_rope_that_cannot_be_undone_is_named_before_a_tensor_that_no_fit_could_measure(method: str):
    rope = {"rope_type": "longrope", "factor": 2.0, "rope_theta": 10000.0, "original_max_position_embeddings": 64}
    model = random_model("llama", rope_parameters=rope | {"short_factor": [1.0] * 16, "long_factor": [2.0] * 16})
    artifact = calibrated_artifact(model)
    for name in [name for name in artifact.tensors if "nuq" in name or "dictionary" in name]:
        del artifact.tensors[name]
    with pytest.raises(
        ValueError, match=r"RoPE of type 'longrope'.*; use a method that keeps keys after RoPE"
    ) as error:
        compress(model, method, artifact)
    assert "is not in this artifact" not in str(error.value)
