"""A row's stored bits depend on its own tokens, not on its batch, its padding or other rows' sizes."""

from itertools import pairwise

import oracle
import pytest
import torch
from cases import BY_NAME, CASES
from in_turn import in_turn
from layer_walk import Tokens, differing, feed, stored
from tolerances import ATTENTION
from toy_models import random_model

from calib.runtime.logits import Logits

pytestmark = pytest.mark.arithmetic

PROMPT, STEPS = 150, 42  # blocks of 32 and of 40 tokens close


@pytest.fixture(scope="module")
def model():
    return random_model("llama")


def run(cache, rows: list[Tokens], prompts: list[int], columns: int | None = None):
    """A padded prompt forward and then decode steps; the outputs of row 0, `[layer][heads, n, D]`."""
    cache.release()
    outputs = [feed(cache, [tokens[:prompt] for tokens, prompt in zip(rows, prompts, strict=True)], columns)]
    for step in range(STEPS):
        outputs.append(feed(cache, [tokens[p + step : p + step + 1] for tokens, p in zip(rows, prompts, strict=True)]))
    return [torch.cat([layer[number][0] for layer in outputs], 1) for number in range(len(cache.compressed))]


@pytest.mark.full
@pytest.mark.parametrize(("case", "dtype"), in_turn(CASES, [torch.float32, torch.bfloat16]))
def test_a_row_is_stored_alike_alone_in_a_batch_and_under_padding(case, dtype):
    model = random_model("llama", dtype)
    mine = Tokens.random(model, PROMPT + STEPS, seed=1)
    others = [(Tokens.random(model, n + STEPS, seed=n), n) for n in (3, 128, 170)]
    wild = (Tokens.random(model, 60 + STEPS, seed=5, magnitude=1e6), 60)
    reference = case.open(model)
    expected_outputs = run(reference, [mine], [PROMPT])
    expected = stored(reference, 0)
    settings = {
        "in a batch of equals": ([(mine, PROMPT)] * 2, None),
        "with shorter and longer rows, under more padding": ([(mine, PROMPT), *others], 400),
        "beside values beyond float16": ([(mine, PROMPT), wild], None),
    }
    for name, (rows, columns) in settings.items():
        cache = case.open(model)
        outputs = run(cache, [tokens for tokens, _ in rows], [prompt for _, prompt in rows], columns)
        assert not differing(stored(cache, 0), expected), name
        for output, reference_output in zip(outputs, expected_outputs, strict=True):
            close = ATTENTION[dtype] * reference_output.abs().max().float()
            assert bool(((output.float() - reference_output.float()).abs() <= 2 * close).all()), name


@pytest.mark.full
@pytest.mark.parametrize("case", [case for case in CASES if not case.by_forwards], ids=str)
def test_a_row_is_stored_alike_however_its_tokens_arrive(model, case):
    """It does matter, and is not tested, where attention decides what is stored (tokens of one forward attend to each other
    exactly) and where a prompt is encoded as a whole."""
    tokens, length = Tokens.random(model, 200, seed=2), 200
    contents = []
    for cuts in ([200], [1, 199], [128, 32, 40], [97, 31, 72], [160] + [1] * 40, [1] * 200):
        cache, at = case.open(model), 0
        cache.release()
        for count in cuts:
            feed(cache, [tokens[at : at + count]])
            at += count
        assert at == length == cache.sequences.lengths[0]
        contents.append(stored(cache, 0))
    for other in contents[1:]:
        assert not differing(other, contents[0])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_rows_of_any_length_and_chunk_padding(model, case):
    """Rows that begin in different forwards, chunks that are all padding for a row, and rows of 0 tokens so far."""
    tokens = [Tokens.random(model, 200, seed=seed) for seed in (3, 4)]
    cache, stops = case.open(model), [(70, 0), (140, 30), (141, 31), (200, 90)]
    cache.release()
    for start, stop in pairwise([(0, 0), *stops]):
        feed(cache, [row[slice(*span)] for row, span in zip(tokens, zip(start, stop, strict=True), strict=True)])
    assert cache.sequences.lengths == [200, 90] and cache.get_seq_length() == 70 + 70 + 1 + 59
    for row, length in enumerate((200, 90)):
        alone, at = case.open(model), 0
        alone.release()
        for stop in [stop[row] for stop in stops] if case.by_forwards else [length]:
            if stop > at:
                feed(alone, [tokens[row][at:stop]])
            at = stop
        assert not differing(stored(cache, row), stored(alone, 0))


@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_row_begins_beside_one_that_goes_on(model, case, late):
    """Without padding, so that both rows are attended together: the new row's prompt has exact causal attention all the same."""
    tokens = [Tokens.random(model, 110, seed=seed) for seed in (3, 4)]
    cuts = [[0, 50, 90, 91, 110], [0, 50, 90, 91, 110]]
    cuts[late] = [0, 0, 40, 41, 60]
    cache, alone = case.open(model), [case.open(model) for _ in tokens]
    for one in (cache, *alone):
        one.release()
    for spans in zip(*map(pairwise, cuts), strict=True):
        brought = [row[slice(*span)] for row, span in zip(tokens, spans, strict=True)]
        outputs = feed(cache, brought)
        for row, own in enumerate(brought):
            for number, (expected,) in enumerate(feed(alone[row], [own]) if len(own) else ()):
                error = (outputs[number][row] - expected).abs().max() / expected.abs().max()
                assert error <= 2 * ATTENTION[torch.float32], (spans, number, row)
    for row in range(2):
        assert not differing(stored(cache, row), stored(alone[row], 0))


@pytest.mark.full
@pytest.mark.parametrize("case", [case for case in CASES if not case.joins_heads], ids=str)
def test_heads_do_not_influence_each_other(case, model):
    tokens, changed = (Tokens.random(model, 260, seed=6) for _ in range(2))
    changed.keys[:, 1] *= 50
    changed.values[:, 1] += 9
    contents = []
    for brought in (tokens, changed):
        cache = case.open(model)
        cache.release()
        feed(cache, [brought])
        contents.append(by_heads(cache))
    first, second = ([{name: part[head] for name, part in one.items()} for one in contents] for head in range(2))
    assert not differing(*first, mass=0)
    assert differing(*second, mass=0)


def by_heads(cache) -> dict[str, torch.Tensor]:
    """What is stored of row 0, `[heads, tokens, width]` each; decoded tokens, if heads share a field such as a list of outliers."""
    parts = stored(cache, 0)
    if all(len(part) > 1 for part in parts.values()):
        return parts
    return {
        f"{number}.{tier}.{role}": tokens
        for number, layer in enumerate(cache.compressed)
        for tier, held in enumerate(layer.store.decoded(0))
        for role, tokens in zip(("keys", "values"), held, strict=True)
    }


@pytest.mark.parametrize("name", ["zipcache", "zipcache-accumulated", "mikv-16-2", "mikv-8-2", "kivi-2-short"])
def test_values_that_16_bits_cannot_hold_come_late(model, name):
    """The prompt has fixed parameters of 16 bits, and what is measured of later tokens is too large for these: it stays
    finite, which is all that can be promised."""
    small, large = Tokens.random(model, 20, seed=5), Tokens.random(model, 80, seed=6, magnitude=1e6)
    cache = BY_NAME[name].open(model)
    cache.release()
    feed(cache, [small])
    outputs = [feed(cache, [large[at : at + 1]]) for at in range(80)]
    assert all(bool(output.isfinite().all()) for layers in outputs for (output,) in layers)
    assert all(bool(part.double().isfinite().all()) for part in stored(cache, 0).values())
    assert all(
        bool(part.isfinite().all()) for ((keys, values, _),) in oracle.contents(cache) for part in (keys, values)
    )


@pytest.mark.full
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_inputs_are_not_changed(case, model):
    """The very tensors that a model hands over; `feed` would hand over copies."""
    cache = case.open(model)
    cache.release()
    given = [[torch.randn(1, heads, n, 32) for heads in (4, 2, 2)] for n in (150, *[1] * 12)]
    copies = [[part.clone() for part in parts] for parts in given]
    for query, keys, values in given:
        for layer in cache.compressed:
            layer.update(keys, values)
            layer.attend(query, None, Logits(0.2))
    for parts, copied in zip(given, copies, strict=True):
        assert all(map(torch.equal, parts, copied))


# --- requests that cannot be met ----------------------------------------------------------------------------------


def forward(cache, rows: int, width: int, mask=None, layers=None):
    for layer in cache.compressed[:layers]:
        layer.update(torch.randn(rows, 2, width, 32), torch.randn(rows, 2, width, 32))
        layer.attend(torch.randn(rows, 4, width, 32), mask, Logits(0.2))


@pytest.fixture
def cache(model):
    cache = BY_NAME["kivi-2-short"].open(model)
    cache.release()
    return cache


def test_a_mask_that_hides_stored_tokens_is_refused(cache):
    forward(cache, 2, 10)
    mask = torch.ones(2, 14, dtype=torch.bool)
    mask[1, 3] = False
    with pytest.raises(ValueError, match=r"\[10, 9\] earlier tokens and the cache holds \[10, 10\].*whole sequence"):
        forward(cache, 2, 4, mask)
    assert cache.sequences.lengths == [10, 10]
    mask[1, 3] = True
    forward(cache, 2, 4, mask)  # nothing was stored by the refused one
    assert cache.sequences.lengths == [14, 14]


def test_another_number_of_rows_is_refused(cache):
    forward(cache, 2, 10)
    with pytest.raises(ValueError, match="holds 2 rows and got 3"):
        forward(cache, 3, 1)
    forward(cache, 2, 1)
    assert cache.sequences.lengths == [11, 11]


@pytest.mark.parametrize(
    "stage", ["with its pages taken", "before the second layer", "in the first layer", "in the last layer"]
)
@pytest.mark.parametrize("reached", ["prompt", "step"])
def test_an_interrupted_forward_is_noticed_until_reset(cache, stage, reached, monkeypatch):
    forward(cache, 2, 40)
    width = 3 if reached == "prompt" else 1
    if stage == "before the second layer":
        forward(cache, 2, width, layers=1)
    elif stage == "with its pages taken":
        take_in = cache.sequences._take_in

        def taken(begun):
            take_in(begun)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(cache.sequences, "_take_in", taken)
            with pytest.raises(KeyboardInterrupt):
                forward(cache, 2, width)
    else:
        broken = cache.compressed[0 if stage == "in the first layer" else -1]

        def interrupted(*_):
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(broken.store, "store", interrupted)
            with pytest.raises(KeyboardInterrupt):
                forward(cache, 2, width)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"interrupted.*cache\.reset\(\)"):
            forward(cache, 2, 1)
    cache.reset()
    forward(cache, 3, 40)
    assert cache.sequences.lengths == [40, 40, 40] and cache.get_seq_length() == 40


@pytest.mark.full
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_reset_cache_is_as_new(case, model):
    cache = case.open(model)
    cache.release()
    feed(cache, [Tokens.random(model, 140, seed=8), Tokens.random(model, 33, seed=9)])
    cache.reset()
    assert cache.get_seq_length() == 0 and cache.sequences.lengths == []
    tokens = Tokens.random(model, 200, seed=10)
    fresh = case.open(model)
    fresh.release()
    for one in (cache, fresh):
        feed(one, [tokens[:185]])
        for at in range(185, 195):
            feed(one, [tokens[at : at + 1]])
    assert not differing(stored(cache, 0), stored(fresh, 0), mass=0)
    assert cache.memory() == fresh.memory()
