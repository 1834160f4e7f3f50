"""Models whose layers all have a sliding window: pages that have left it are freed, and outputs do not change."""

import oracle
import pytest
import torch
from cases import BY_NAME, CASES
from layer_walk import Tokens, sequence_states
from offloaded_tokens import moments
from tolerances import ATTENTION, MEMORY
from toy_models import COMMON, SLIDING, generate, left_padded, random_model
from transformers import DynamicCache, Qwen2MoeConfig, Qwen2MoeForCausalLM

from calib.runtime import compress
from calib.runtime.logits import Logits
from calib.runtime.paging.page_numbers import EMPTY, PAGE_TOKENS

WINDOW = 300  # tokens; four pages at most
# Single steps where the oldest visible token is the last of a page (426 and 554 tokens held), and beyond.
STOPS = (250, 300, 301, 302, 400, *range(424, 430), 513, *range(550, 558), 700, *range(701, 706), 712, 890)


@pytest.fixture(scope="module")
def model():
    return random_model("mistral-sliding", sliding_window=WINDOW)


def walk(cache, rows: list[Tokens]) -> list[list[torch.Tensor]]:
    """One forward without padding under the sliding window: outputs `[layer][row]`."""
    outputs = []
    for number, layer in enumerate(cache.compressed):
        query, keys, values = (
            torch.stack([getattr(t, n)[number] for t in rows]) for n in ("queries", "keys", "values")
        )
        layer.update(keys, values)
        outputs.append(list(layer.attend(query, None, Logits(32**-0.5, sliding=WINDOW))))
    return outputs


def held_pages(cache) -> list[int]:
    """Pages that each row holds."""
    return [sum(page != EMPTY for page in row) for row in cache.sequences.table.rows]


@pytest.mark.full
@pytest.mark.arithmetic
@pytest.mark.parametrize("case", [case for case in CASES if not case.tiered], ids=str)
def test_attention_over_what_is_left_is_that_over_everything(model, case):
    """Steps and chunks, against float64 attention over every token as it was stored in a second cache that frees no page."""
    tokens = [Tokens.random(model, 900, seed=seed) for seed in (1, 2)]
    cache, everything = case.open(model), case.open(model)
    for rows in {rows for rows, _, _ in sequence_states(everything)}:
        rows.sliding = None
    cache.release()
    everything.release()
    at = 0
    for stop in STOPS:
        brought = [row[at:stop] for row in tokens]
        before = moments(everything)
        outputs = walk(cache, brought)
        walk(everything, brought)
        assert worst(outputs, before, brought, at) < ATTENTION[torch.float32], stop
        at = stop
    now, then = oracle.contents(cache), oracle.contents(everything)
    for layer in range(2):
        for row in range(2):
            for mine, other in zip(now[layer][row][:2], then[layer][row][:2], strict=True):
                assert torch.equal(mine[:, -WINDOW + 1 :], other[:, -WINDOW + 1 :])
    assert max(held_pages(cache)) < min(held_pages(everything))


@pytest.mark.full
@pytest.mark.arithmetic
@pytest.mark.parametrize("case", [case for case in CASES if case.tiered and not case.relocates], ids=str)
def test_attention_over_tiers_is_that_over_what_they_hold_of_the_window(model, case):
    """Tokens of tiers lie in any order: their positions decide which of them have left the window."""
    tokens = [Tokens.random(model, 900, seed=seed) for seed in (1, 2)]
    cache, at = case.open(model), 0
    cache.release()
    for stop in STOPS:
        brought = [row[at:stop] for row in tokens]
        before = moments(cache)
        outputs = walk(cache, brought)
        assert (
            worst(
                outputs,
                before,
                brought,
                at,
                case.options.get("ratio", 0.2) if at and case.method == "oracle" else None,
            )
            < ATTENTION[torch.float32]
        ), stop
        at = stop
    for layer in oracle.contents(cache):
        for held in layer:
            assert bool((held.positions.sort(1).values.diff(dim=1) > 0).all()) and int(held.positions.max()) < at


def worst(outputs, held, brought: list[Tokens], at: int, kept: float | None = None) -> float:
    """The largest error of a forward at `at` against attention in float64 over what was `held` before it."""
    found = 0.0
    for layer, rows in enumerate(outputs):
        for row, new in enumerate(brought):
            keys, values = new.keys[layer].double(), new.values[layer].double()
            positions = torch.arange(at, at + len(new)).expand(keys.shape[:2])
            if at:
                old = held[layer][row].met(len(new), speculative=False)
                keys, values = torch.cat([old.keys, keys], 1), torch.cat([old.values, values], 1)
                positions = torch.cat([old.positions, positions], 1)
            expected = oracle.attention(
                new.queries[layer], keys, values, 32**-0.5, sliding=WINDOW, positions=positions, kept=kept
            )
            found = max(found, float((rows[row].double() - expected).abs().max() / expected.abs().max()))
    return found


def test_pages_before_a_long_chunk_are_given_back_after_it(model):
    """The chunk never needs pages 1 to 5, so that empty entries of the table lie between the old page and the new ones."""
    cache = BY_NAME["rtn-4"].open(model)
    cache.release()
    for step in range(4):
        walk(cache, [Tokens.random(model, 100, seed=step)])
        walk(cache, [Tokens.random(model, 1000, seed=step)])
        walk(cache, [Tokens.random(model, 1, seed=step)])
        length = 1101 * (step + 1)  # the last query, at length - 1, saw WINDOW tokens back, itself included
        assert held_pages(cache) == [-(-length // PAGE_TOKENS) - (length - WINDOW) // PAGE_TOKENS]
        assert cache.sequences.table.capacity <= 7


@pytest.mark.full
@pytest.mark.parametrize("held", [0, 200])
@pytest.mark.parametrize("name", ["full", "kivi-2-short", "zipcache-short", "mikv-8-2"])
def test_a_chunk_longer_than_a_block_of_queries(model, name, held):
    cache, tokens = BY_NAME[name].open(model), Tokens.random(model, 1300, seed=5)
    cache.release()
    if held:
        walk(cache, [tokens[:held]])
    before = moments(cache)
    outputs = walk(cache, [tokens[held:]])
    assert worst(outputs, before, [tokens[held:]], held) < ATTENTION[torch.float32]


@pytest.mark.full
@pytest.mark.parametrize("case", [case for case in CASES if not case.tiered], ids=str)
def test_memory_stops_growing(model, case):
    cache, weights = case.open(model), []
    cache.release()
    for step in range(90):
        walk(cache, [Tokens.random(model, 32, seed=step)])
        memory = cache.memory()
        assert abs(memory.measured_bytes - memory.predicted_bytes) <= MEMORY * memory.predicted_bytes
        weights.append(memory.measured_bytes - memory.by_kind["tables"] + memory.host_bytes)
    assert max(held_pages(cache)) <= -(-(WINDOW + 2 * 32) // PAGE_TOKENS) + 1
    assert max(weights[45:]) == max(weights[22:45])
    # A window of 300 tokens at this length of 2,880: four or five pages instead of 23.
    assert all(table.capacity <= 5 for table in cache.sequences.all_tables)


@pytest.mark.parametrize("name", ["full", "rtn-4", "kivi-4", "kivi-2-fine", "kivi-2-calibrated"])
def test_a_long_prompt_is_not_stored_beyond_the_window(model, name):
    cache, everything, tokens = BY_NAME[name].open(model), BY_NAME[name].open(model), Tokens.random(model, 3000, seed=3)
    everything.sequences.sliding = None
    for one in (cache, everything):
        one.release()
        walk(one, [tokens])
    assert cache.sequences.table.capacity <= 4 and max(held_pages(cache)) <= 4
    for mine, other in zip(oracle.contents(cache), oracle.contents(everything), strict=True):
        for m, o in zip(mine[0][:2], other[0][:2], strict=True):
            assert torch.equal(m[:, 1 - WINDOW :], o[:, 1 - WINDOW :])


@pytest.mark.full
@pytest.mark.parametrize("name", ["kivi-2-short", "rtn-4", "kivi-4"])
def test_ragged_batches_and_beams(model, name):
    inputs = left_padded([700, 90, 320])
    with BY_NAME[name].open(model) as cache:
        model.generate(**inputs, past_key_values=cache, max_new_tokens=40, do_sample=False, num_beams=3)
        assert cache.sequences.table.capacity <= 3 * 3 * 5
    alone = []
    for row, length in enumerate((700, 90, 320)):
        with BY_NAME[name].open(model) as cache:
            ids = inputs["input_ids"][row : row + 1, -length:]
            alone.append(model.generate(ids, past_key_values=cache, max_new_tokens=40, do_sample=False)[0, -40:])
    with BY_NAME[name].open(model) as cache:
        together = model.generate(**inputs, past_key_values=cache, max_new_tokens=40, do_sample=False)[:, -40:]
    assert sum(int((mine == other).sum()) for mine, other in zip(together, alone, strict=True)) >= 60


@pytest.mark.full
def test_beams_under_a_window_shorter_than_the_exact_one():
    """48 tokens are seen and 128 are exact: whole pages are empty while rows still share others."""
    model, inputs = random_model("mistral-sliding"), left_padded([300, 190])
    answers = []
    for name in ("full", "kivi-8"):
        with BY_NAME[name].open(model) as cache:
            answers.append(
                model.generate(**inputs, past_key_values=cache, max_new_tokens=60, do_sample=False, num_beams=4)
            )
            assert cache.sequences.table.capacity <= 2 * 4 * 2
    # The last 48 tokens are always exact, so nothing is lost at all.
    assert torch.equal(*answers)


@pytest.mark.full
def test_full_beyond_the_window_is_the_dynamic_cache(model):
    inputs = left_padded([700, 90, 320])
    expected = generate(model, inputs, DynamicCache(config=model.config), max_new_tokens=150)
    with compress(model, method="full") as cache:
        found = generate(model, inputs, cache, max_new_tokens=150)
        assert held_pages(cache) == [3, 2, 3]  # tokens 549 ... 848, 0 ... 238 and 169 ... 468
    assert torch.equal(found.sequences, expected.sequences)


@pytest.mark.parametrize("kinds", [None, ("sliding", "full"), ("sliding", "sliding")], ids=str)
def test_a_window_that_the_mask_alone_tells(kinds):
    """Qwen2-MoE passes its attention no window, only a mask; without one its configuration says 0, and it makes the mask, too."""
    slides = {} if kinds is None else {"use_sliding_window": True, "sliding_window": SLIDING}
    settings = COMMON | slides | {"layer_types": kinds and [f"{kind}_attention" for kind in kinds]}
    experts = {
        "num_experts": 2,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
    }
    torch.manual_seed(3)
    config = Qwen2MoeConfig(**settings, **experts, num_attention_heads=2, num_key_value_heads=2)
    model, inputs = Qwen2MoeForCausalLM(config).eval(), left_padded([90, 61])
    expected = generate(model, inputs, DynamicCache(config=model.config))
    with compress(model, "full") as cache:
        found = generate(model, inputs, cache)
    for ours, theirs in zip(found.logits, expected.logits, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-4)


def test_a_layer_that_looks_further_back_is_refused(model):
    cache = compress(model, method="rtn")
    cache.release()
    layer, tokens = cache.compressed[0], Tokens.random(model, 9, seed=4)
    layer.update(tokens.keys[:1], tokens.values[:1])
    with pytest.raises(ValueError, match="attends to everything, and the cache keeps the 300 tokens"):
        layer.attend(tokens.queries[:1], None, Logits(0.2))
    layer.update(tokens.keys[:1], tokens.values[:1])
    with pytest.raises(ValueError, match="attends 301 tokens back"):
        layer.attend(tokens.queries[:1], None, Logits(0.2, sliding=301))
