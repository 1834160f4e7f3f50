"""Measured losses of the errors of `klt` head by head, and bases rescaled by them."""

from itertools import product

import pytest
import torch
from toy_artifact import toy_artifact, toy_model
from transformers import DynamicCache

from calib.fit.head_losses import MOST, factors, head_losses, heads_of, reweighted, with_part
from calib.runtime import compress
from calib.runtime.artifact.component_bits import ROLES
from calib.runtime.artifact.components import Coding, allocator, layer_codes
from calib.runtime.methods.klt import Klt


def some_tokens(sequences, length=64):
    return torch.randint(3, 64, (sequences, length), generator=torch.Generator().manual_seed(0))


@pytest.mark.full
@pytest.mark.parametrize("window", [None, 40])
@torch.no_grad()
def test_one_part_of_one_head_is_coded_at_a_time(window):
    """Against prefills of exact and coded caches and the answers' KL divergence in float64; also if all layers slide."""
    model = toy_model("mistral", sliding_window=window)
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight *= 300  # so that answers depend on keys
    artifact, tokens = toy_artifact(model), some_tokens(3)
    found, predicted = head_losses(model, artifact, tokens)
    coding = Klt(bits=1.25, trellis=False).coding(artifact)
    budgets = allocator(artifact, coding)
    bits = max(1.25, budgets.least_bits)
    expected = torch.zeros(3, 2, 2, 2, dtype=torch.float64)
    with compress(model, "klt", artifact=artifact, bits=bits, window=0, size=coding.size, trellis=False) as cache:
        for sequence, row in enumerate(tokens):
            exact = DynamicCache(config=model.config)
            model(row[None, :56], past_key_values=exact)
            cache.reset()
            model(row[None, :56], past_key_values=cache)
            said = log_p(model, row[56:], exact, 2 * [(None, None)])
            for role, layer, head in product(range(2), repeat=3):
                held = (exact.layers[layer].keys, exact.layers[layer].values)[role].clone()
                held[0, head] = cache.layers[layer].store.read_back(0)[role][head, -held.shape[2] :]
                parts = [[None, None], [None, None]]
                parts[layer][role] = held
                coded = log_p(model, row[56:], exact, parts)
                expected[sequence, role, layer, head] = (said.exp() * (said - coded)).sum(-1).mean()
    assert found.min() > 1e-5
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-6)
    allotted = budgets.at_bits(bits)
    assert predicted.tolist() == [[list(heads) for heads in allotted.errors[role]] for role in ROLES]
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
def test_sixteen_sequences_are_used_evenly_apart():
    model, artifact, tokens = toy_model(), toy_artifact(), some_tokens(31)
    torch.testing.assert_close(head_losses(model, artifact, tokens), head_losses(model, artifact, tokens[::2]))
    assert not torch.equal(head_losses(model, artifact, tokens)[0], head_losses(model, artifact, tokens[:16])[0])


@pytest.mark.parametrize(
    ("heads", "sequences"), [(1, 8), (4, 8), (5, 8), (8, 8), (12, 8), (32, 8), (40, 8), (8, 1), (32, 3)]
)
def test_every_head_is_measured_about_as_often(heads, sequences):
    for layer in range(3):
        own = [head for sequence in range(sequences) for head in heads_of(sequence, layer, heads, sequences)]
        times = [own.count(head) for head in range(heads)]
        assert min(times) >= 1 and max(times) - min(times) <= 1
        assert max(times) == sequences or heads > 4
    assert all(len(heads_of(sequence, 0, heads, 8)) <= max(4, -(-heads // 8)) for sequence in range(8))


@pytest.mark.full
def test_of_many_heads_a_sequence_measures_some(monkeypatch):
    monkeypatch.setattr("calib.fit.head_losses.HEADS", 1)
    found, predicted = head_losses(toy_model(), toy_artifact(), some_tokens(3))
    for sequence, layer, head in product(range(3), range(2), range(2)):
        measured = head == (sequence + layer) % 2
        assert found[sequence, :, layer, head].isfinite().tolist() == [measured, measured]
    assert factors(found, predicted).ne(1).all()


def test_other_keys_of_one_head_leave_the_cache_as_it_was():
    cache = DynamicCache()
    for layer in range(2):
        cache.update(torch.zeros(1, 2, 5, 4), torch.zeros(1, 2, 5, 4), layer)
    one = with_part(cache, 1, "keys", 1, torch.ones(5, 4))
    assert one.layers[1].keys[0, 1].eq(1).all() and one.layers[1].keys[0, 0].eq(0).all()
    assert one.layers[1].values.eq(0).all() and one.layers[0].keys.eq(0).all()
    one.update(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4), 0)
    assert cache.get_seq_length() == 5 and cache.layers[1].keys.eq(0).all()
    shorter = with_part(cache, 0, "values", 0, torch.ones(2, 4))
    assert shorter.layers[0].values[0, 0, :, 0].tolist() == [0, 0, 0, 1, 1]
    longer = with_part(cache, 0, "values", 0, torch.arange(7.0)[:, None].expand(7, 4))
    assert longer.layers[0].values[0, 0, :, 0].tolist() == [2, 3, 4, 5, 6]


def test_factors_by_hand():
    predicted = torch.tensor([[[1.0, 1.0]], [[5.0, 2.0]]], dtype=torch.float64)
    losses = torch.tensor([[[[1.0, 4.0]], [[1.0, 3.0]]]], dtype=torch.float64)

    def expected(of_head, of_layer, own):
        return (torch.tensor(of_head) ** own * torch.tensor(of_layer) ** (1 - own)).double() ** 0.75

    # 9 nats in all by 9 predicted: no rescaling. The keys' two heads lose 5 for 2 predicted, the values' 4 for 7.
    heads, layers = [[[1.0, 4.0]], [[0.2, 1.5]]], [[[2.5, 2.5]], [[4 / 7, 4 / 7]]]
    torch.testing.assert_close(factors(losses, predicted), expected(heads, layers, 1 / 3))
    # A sequence that loses a thousand times as much has the same weight.
    torch.testing.assert_close(factors(torch.cat([losses, 1000 * losses]), predicted), expected(heads, layers, 1 / 2))
    # A sequence that measured the second heads only: 21 nats by 3 predicted, so 1 and 2 in units of its mean ratio.
    half = torch.tensor([[[[torch.nan, 7.0]], [[torch.nan, 14.0]]]], dtype=torch.float64)
    heads, layers = [[[1.0, 2.5]], [[0.2, 1.25]]], [[[2.0, 2.0]], [[6 / 9, 6 / 9]]]
    own = torch.tensor([1 / 3, 1 / 2])
    torch.testing.assert_close(factors(torch.cat([losses, half]), predicted), expected(heads, layers, own))
    # Factors are 1 if nothing was measured, lost or predicted; ratios are clamped to 1 / MOST and MOST.
    assert factors(torch.full_like(losses, torch.nan), predicted).eq(1).all()
    assert factors(torch.zeros_like(losses), predicted).eq(1).all() and factors(losses, 0 * predicted).eq(1).all()
    found = factors(torch.tensor([[[[1e-9], [2.0]]]]), torch.tensor([[[1.0], [1.0]]]))
    torch.testing.assert_close(found, torch.tensor([[[1 / MOST], [2.0]]]).pow(0.75))
    found = factors(torch.tensor([[[[1.0], [1.0]]]]), torch.tensor([[[1e-9], [1.0]]]))
    torch.testing.assert_close(found, torch.tensor([[[MOST], [0.5]]]).pow(0.75))


@pytest.mark.parametrize("coding", [Coding("before"), Coding("after"), Coding("before", True, True, True)], ids=str)
def test_errors_count_otherwise_and_codes_are_the_same(coding):
    artifact = toy_artifact()
    by = torch.tensor([[[16.0, 1.0], [0.25, 0.25]], [[1.0, 9.0], [4.0, 0.5]]], dtype=torch.float64)
    scaled = reweighted(artifact, by)
    other = toy_artifact(tensors=artifact.tensors | scaled)
    assert not any(name.endswith(("mean", "matrix", "loss")) for name in scaled)
    at, now = (allocator(one, coding).at_bits(3.0) for one in (artifact, other))
    assert at.streams != now.streams  # bits are shared out otherwise
    for number, role in enumerate(ROLES):
        errors = [one.tensor(coding.name(role, "errors")) for one in (artifact, other)]
        torch.testing.assert_close(errors[0] * by[number, ..., None, None].float(), errors[1])
        for layer, words in enumerate(at.streams[role]):
            before, after = (layer_codes(one, role, layer, words, coding) for one in (artifact, other))
            x = torch.randn(1, 2, 32, 8, generator=torch.Generator().manual_seed(1))
            y, z = (codes.codec.encode(codes.basis.forward(x)) for codes in (before, after))
            assert all(torch.equal(y[name], z[name]) for name in y)
            torch.testing.assert_close(before.half_steps, after.half_steps)
