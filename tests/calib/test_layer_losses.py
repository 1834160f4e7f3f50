"""What errors of `klt` cost layer by layer, and bases whose errors count as much."""

import pytest
import torch
from toy_artifact import toy_artifact, toy_model
from transformers import DynamicCache

from calib.fit.layer_losses import MOST, factors, layer_losses, reweighted, with_part
from calib.runtime import compress
from calib.runtime.artifact.component_bits import ROLES
from calib.runtime.artifact.components import Coding, allocator, layer_codes
from calib.runtime.methods.klt import Klt


def some_tokens(sequences, length=64):
    return torch.randint(3, 64, (sequences, length), generator=torch.Generator().manual_seed(0))


@pytest.mark.full
@pytest.mark.parametrize("window", [None, 40])
@torch.no_grad()
def test_one_part_of_one_layer_is_coded_at_a_time(window):
    """Beside a prefill by the model itself, and answers' divergence in float64; also where every layer slides."""
    model = toy_model("mistral", sliding_window=window)
    artifact, tokens = toy_artifact(model), some_tokens(3)
    found, predicted = layer_losses(model, artifact, tokens)
    coding = Klt(bits=1.25).coding(artifact)
    budgets = allocator(artifact, coding)
    bits = max(1.25, budgets.least_bits)
    expected = torch.zeros(2, 2, dtype=torch.float64)
    with compress(model, "klt", artifact=artifact, bits=bits, window=0, size=coding.size) as cache:
        for row in tokens:
            exact = DynamicCache(config=model.config)
            model(row[None, :56], past_key_values=exact)
            cache.reset()
            model(row[None, :56], past_key_values=cache)
            said = log_p(model, row[56:], exact, 2 * [(None, None)])
            for layer in range(2):
                for role in range(2):
                    parts = [[None, None], [None, None]]
                    parts[layer][role] = cache.layers[layer].store.read_back(0)[role][None]
                    coded = log_p(model, row[56:], exact, parts)
                    expected[role, layer] += (said.exp() * (said - coded)).sum(-1).mean() / 3
    assert found.min() > 0
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-6)
    allotted = budgets.at_bits(bits)
    assert predicted.tolist() == [list(allotted.errors[role]) for role in ROLES]
    assert predicted.sum().item() == pytest.approx(allotted.error)


def log_p(model, answer, exact, parts):
    cache = DynamicCache(config=model.config)
    for number, (layer, part) in enumerate(zip(exact.layers, parts, strict=True)):
        held = layer.keys.shape[-2]
        keys, values = (
            own if new is None else new[:, :, -held:] for own, new in zip((layer.keys, layer.values), part, strict=True)
        )
        cache.update(keys, values, number)
    positions = torch.arange(56, 64)[None]
    return model(answer[None], past_key_values=cache, position_ids=positions).logits[0].double().log_softmax(-1)


@pytest.mark.full
def test_eight_sequences_are_used_evenly_apart():
    model, artifact, tokens = toy_model(), toy_artifact(), some_tokens(15)
    torch.testing.assert_close(layer_losses(model, artifact, tokens), layer_losses(model, artifact, tokens[::2]))
    assert not torch.equal(layer_losses(model, artifact, tokens)[0], layer_losses(model, artifact, tokens[:8])[0])


def test_other_keys_of_one_layer_leave_the_cache_as_it_was():
    cache = DynamicCache()
    for layer in range(2):
        cache.update(torch.zeros(1, 2, 5, 4), torch.zeros(1, 2, 5, 4), layer)
    one = with_part(cache, 1, "keys", torch.ones(2, 5, 4))
    assert one.layers[1].keys.eq(1).all() and one.layers[1].values.eq(0).all() and one.layers[0].keys.eq(0).all()
    one.update(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4), 0)
    assert cache.get_seq_length() == 5 and cache.layers[1].keys.eq(0).all()
    shorter = with_part(cache, 0, "values", torch.ones(2, 2, 4))
    assert shorter.layers[0].values[0, 0, :, 0].tolist() == [0, 0, 0, 1, 1]


def test_factors_by_hand():
    losses = torch.tensor([[1.0, 4.0], [0.0, 3.0]], dtype=torch.float64)
    predicted = torch.tensor([[1.0, 1.0], [5.0, 2.0]], dtype=torch.float64)
    # Eight of nats by four predicted: twice as much as predicted in the mean.
    expected = torch.tensor([[0.5**0.75, 2**0.75], [1.0, 0.75**0.75]], dtype=torch.float64)
    torch.testing.assert_close(factors(losses, predicted), expected)
    assert factors(torch.zeros(2, 2), predicted).eq(1).all() and factors(losses, torch.zeros(2, 2)).eq(1).all()
    lopsided = factors(torch.tensor([[1e-9, 1.0]]), torch.tensor([[1.0, 1.0]]))
    torch.testing.assert_close(lopsided, torch.tensor([[1 / MOST, 2.0]]).pow(0.75))


@pytest.mark.parametrize("coding", [Coding("before"), Coding("after"), Coding("before", True, True, True)], ids=str)
def test_errors_count_otherwise_and_codes_are_the_same(coding):
    artifact = toy_artifact()
    by = torch.tensor([[16.0, 0.25], [1.0, 4.0]], dtype=torch.float64)
    scaled = reweighted(artifact, by)
    other = toy_artifact(tensors=artifact.tensors | scaled)
    assert not any(name.endswith(("mean", "matrix", "loss")) for name in scaled)
    at, now = (allocator(one, coding).at_bits(3.0) for one in (artifact, other))
    assert at.streams != now.streams  # bits are shared out otherwise
    for number, role in enumerate(ROLES):
        errors = [one.tensor(coding.name(role, "errors")) for one in (artifact, other)]
        torch.testing.assert_close(errors[0] * by[number, :, None, None, None].float(), errors[1])
        for layer, words in enumerate(at.streams[role]):
            before, after = (layer_codes(one, role, layer, words, coding) for one in (artifact, other))
            x = torch.randn(1, 2, 32, 8, generator=torch.Generator().manual_seed(1))
            y, z = (codes.codec.encode(codes.basis.forward(x)) for codes in (before, after))
            assert all(torch.equal(y[name], z[name]) for name in y)
            torch.testing.assert_close(before.half_steps, after.half_steps)
