"""What a speculative cache holds after a text was generated: its true tokens, on the host and as the low-bit copy; no guess."""

import copy
from dataclasses import dataclass, field

import oracle
import pytest
import torch
from layer_walk import differing, parts_of
from tolerances import FORWARD
from torch import Tensor
from toy_models import generate, left_padded, random_model

from calib.runtime import compress
from calib.runtime.layer import CompressedLayer
from calib.runtime.logits import Logits
from calib.runtime.memory import tensors
from calib.runtime.offload.top_tokens import TopTokensStore

SHORT = {"method": "specache", "k": 8, "residual": 32}
LENGTHS = [100, 37, 64]
KIVI, RTN = {"method": "kivi", "residual": 32}, {"method": "rtn", "bits": 2}
CSR = {"method": "csr", "online": 40, "window": 16, "block": 8}


@pytest.fixture(scope="module")
def model():
    return random_model("llama")


@dataclass
class Arrived:
    """One forward of one layer: `[rows, heads, n, D]` each, of which the last column may be a guess."""

    query: Tensor
    keys: Tensor
    values: Tensor
    mask: Tensor | None
    logits: Logits
    speculative: bool

    @property
    def true(self) -> "Arrived":
        """Without the guess."""
        columns = slice(self.keys.shape[2] - self.speculative)
        mask = None if self.mask is None else self.mask[:, : self.mask.shape[1] - self.speculative]
        parts = (part[:, :, columns] for part in (self.query, self.keys, self.values))
        return Arrived(*parts, mask, self.logits, speculative=False)


@dataclass
class Recorded:
    """All that arrives at the layers of caches from now on, by layer."""

    layers: dict[int, list[Arrived]] = field(default_factory=dict)

    def true(self, row: int, layer: int, length: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a row's true tokens, `[kv_heads, length, D]`: padding came before them."""
        parts = [arrived.true for arrived in self.layers[layer]]
        return tuple(torch.cat([getattr(part, n)[row] for part in parts], 1)[:, -length:] for n in ("keys", "values"))


@pytest.fixture
def recorded(monkeypatch) -> Recorded:
    found, original = Recorded(), CompressedLayer.attend

    def attend(layer, query, mask, logits):
        given = [part.clone() for part in (query, *layer._arrived)]
        output = original(layer, query, mask, logits)
        arrived = Arrived(*given, mask, logits, layer.sequences.forward.speculative)
        found.layers.setdefault(layer.context.layer, []).append(arrived)
        return output

    monkeypatch.setattr(CompressedLayer, "attend", attend)
    return found


def replayed(model, low: dict, recorded: Recorded):
    """A cache of the low-bit method alone that is fed the true tokens."""
    cache, layers = compress(model, **low), [list(recorded.layers[number]) for number in sorted(recorded.layers)]
    cache.release()
    for forwards in zip(*layers, strict=True):
        for layer, arrived in zip(cache.compressed, (arrived.true for arrived in forwards), strict=True):
            if arrived.keys.shape[2]:
                layer.update(arrived.keys, arrived.values)
                layer.attend(arrived.query, arrived.mask, arrived.logits)
    return cache


@pytest.mark.full
@pytest.mark.parametrize("speculative", [True, False], ids=["ahead", "late"])
@pytest.mark.parametrize(
    ("wanted", "low"),
    [(SHORT, KIVI), *(({"method": "specache", "k": 8, "low": low}, low) for low in (RTN, CSR))],
    ids=["kivi", "rtn", "csr"],
)
@torch.no_grad()
def test_true_tokens_are_stored_as_without_guesses(model, wanted, low, speculative, recorded):
    """The host has them exactly as given; the low-bit copy is bit for bit what its method stores of the true tokens alone."""
    steps = 110
    with compress(model, **wanted, speculative=speculative) as cache:
        generate(model, left_padded(LENGTHS), cache, max_new_tokens=steps + 1)
    lengths = [length + steps for length in LENGTHS]
    assert cache.sequences.lengths == cache.sequences.host_state.lengths == lengths
    for forwards in recorded.layers.values():
        assert sum(arrived.speculative for arrived in forwards) == (steps + 1 if speculative else 0)
    given = [[recorded.true(row, number, lengths[row]) for row in range(3)] for number in recorded.layers]
    plain = replayed(model, low, recorded)
    assert plain.sequences.lengths == lengths and plain.get_seq_length() == cache.get_seq_length()
    for number, layer in enumerate(cache.compressed):
        for row, length in enumerate(lengths):
            held = oracle.held_by(layer.store.host, row)
            assert held.keys.shape[1] == length
            for mine, other in zip(held[:2], given[number][row], strict=True):
                assert torch.equal(mine, other.double())
            mine, other = (dict(parts_of(store, row)) for store in (layer.store.low, plain.compressed[number].store))
            mine = {name: part for name, part in mine.items() if not name.endswith("positions")}  # not stored alone
            assert mine and not differing(mine, other)


@pytest.mark.full
@torch.no_grad()
def test_a_guess_is_kept_nowhere(model, recorded):
    """No number of a guess's key or value is found in any tensor of the cache, but what a true token has as well."""
    with compress(model, **SHORT) as cache:
        generate(model, left_padded(LENGTHS), cache, max_new_tokens=60)
        true, speculated = [], []
        for forwards in recorded.layers.values():
            for arrived in forwards:
                true += [part.flatten() for part in (arrived.true.keys, arrived.true.values)]
                if arrived.speculative:
                    speculated += [part[:, :, -1].flatten() for part in (arrived.keys, arrived.values)]
        true, speculated = (torch.cat(part).unique() for part in (true, speculated))
        only = speculated[~torch.isin(speculated, true)]  # a guess that was right is a true token later
        assert len(only) > 10_000
        held = [part for part in tensors(cache) if part.dtype == torch.float32]  # in 16 bits are parameters alone
        assert not any(torch.isin(part, only).any() for part in held)
        stored = torch.cat([part.flatten() for part in held])
        assert torch.isin(true, stored).float().mean() > 0.9


@pytest.mark.full
@pytest.mark.parametrize("family", ["llama", "gemma2", "mistral-sliding", "qwen3-mixed"])
@torch.no_grad()
def test_a_guess_beside_it_leaves_a_step_as_it_is(family, monkeypatch):
    """A step without the speculative column, over the same packed and fetched tokens, has the same logits."""
    model, inputs = random_model(family), left_padded(LENGTHS)
    mask, attend = inputs["attention_mask"], TopTokensStore.attend

    def alone(store, request):
        assert request.given.query.shape[2] == 1 and not request.forward.speculative
        return store.low.attend(request._replace(fetched=store._fetched_tokens(request, asks=False)))

    with compress(model, **SHORT) as cache:
        logits = model(**inputs, position_ids=(mask.cumsum(1) - 1).clamp(min=0), past_key_values=cache).logits[:, -1:]
        mattered = 0
        for step in range(40):
            mask = torch.nn.functional.pad(mask, (0, 1), value=1)
            token, positions = logits.argmax(-1), mask.sum(1, keepdim=True) - 1
            named = {"attention_mask": mask, "position_ids": positions}
            if step:
                single = copy.deepcopy(cache)
                single.speculator = None
                low = copy.deepcopy(single)
                for layer in low.compressed:
                    layer.store.pool.positions.fill_(-1)
                with monkeypatch.context() as patch:
                    patch.setattr(TopTokensStore, "attend", alone)
                    expected, without = (model(token, **named, past_key_values=one).logits for one in (single, low))
                single.release()
                low.release()
            logits = model(token, **named, past_key_values=cache).logits
            assert logits.shape[1] == 1
            if step:
                close = FORWARD[torch.float32] * expected.abs().max()
                assert (logits - expected).abs().max() <= close
                mattered += bool((logits - without).abs().max() > 100 * close)
    assert mattered > 30, "it made no difference which tokens were fetched"
    assert TopTokensStore.attend is attend


@pytest.mark.full
@pytest.mark.parametrize("speculative", [True, False], ids=["ahead", "late"])
@pytest.mark.parametrize("k", [3, 40, 1000])
@torch.no_grad()
def test_what_was_fetched_is_counted(model, k, speculative):
    """Each step fetches exactly the chosen pairs that were not on the device; none, if the same ones are chosen again."""
    wanted, nothing = SHORT | {"k": k, "speculative": speculative}, 0
    with compress(model, **wanted) as cache:
        held = [(set(), 0)] * 2
        tokens = left_padded([70, 30])["input_ids"]
        model(tokens, past_key_values=cache)
        for step in range(60):
            model(tokens[:, -1:] + step % 5, past_key_values=cache)
            for number, layer in enumerate(cache.compressed):
                pool = layer.store.pool
                now = {
                    (row, head, int(position))
                    for row, heads in enumerate(pool.positions)
                    for head, positions in enumerate(heads)
                    for position in positions
                    if position >= 0
                }
                count = int((pool.positions >= 0).sum())
                encoded = [cache.sequences.encoded(row, length) for row, length in enumerate(cache.sequences.lengths)]
                assert len(now) == count == 2 * sum(min(k, number) for number in encoded) or not speculative
                before, fetched = held[number]
                new = len(now - before)
                if step or not speculative:  # the first step fetches for the first guess, too
                    assert int(pool.fetched) - fetched == new
                    nothing += not new
                held[number] = now, int(pool.fetched)
        # With room for all tokens every step fetches nothing, but the first and those after a block of 32 tokens was encoded.
        assert nothing == 2 * (60 - 3) or k < 1000
