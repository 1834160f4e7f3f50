"""Caches as objects: deep copies, moves between devices, two at once, and memory that beams and selections free."""

import copy
from collections.abc import Iterator
from dataclasses import is_dataclass

import pytest
import torch
from cases import BY_NAME, CASES
from layer_walk import Tokens, differing, feed, pools_of, sequence_states, stored
from tolerances import MEMORY
from toy_models import NEW, generate, left_padded, random_model

from calib.runtime.memory import tensors
from calib.runtime.stages.codec import Direction, DualScale, Exact, UniformQuant
from calib.runtime.stages.shared_table import SharedTable
from calib.runtime.tiered.sequence_state import TieredSequenceState


@pytest.fixture(scope="module")
def model():
    return random_model("llama")


def same(found, expected, rows: int) -> bool:
    """Whether two caches store the same bits, mass included."""
    return not any(differing(stored(found, row), stored(expected, row), mass=0) for row in range(rows))


def shared_tables(cache) -> list[SharedTable]:
    """The tables that layers and copies of a cache share; nothing writes to them."""
    return [table for layer in cache.compressed for table in tables_in(layer.plan)]


def tables_in(part) -> Iterator[SharedTable]:
    """Yields the shared tables in a plan, a stage, or a tuple of these."""
    if isinstance(part, SharedTable):
        yield part
    elif is_dataclass(part) or isinstance(part, tuple):
        for inner in part if isinstance(part, tuple) else vars(part).values():
            yield from tables_in(inner)


@pytest.mark.full
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_deep_copy_goes_its_own_way(model, case):
    inputs = left_padded([150, 40])
    with case.open(model) as cache:
        first = generate(model, inputs, cache, max_new_tokens=6).sequences
        branch, untouched = copy.deepcopy(cache), copy.deepcopy(cache)
        mine, other = ({id(t) for t in tensors(one.layers)} for one in (cache, branch))
        assert mine and mine & other == {id(table.tensor) for table in shared_tables(cache)}
        mask = torch.cat([inputs["attention_mask"], torch.ones(2, 6, dtype=torch.long)], 1)
        turn = {"input_ids": first, "attention_mask": mask}
        continued = generate(model, turn, branch, max_new_tokens=9).sequences
        assert same(cache, untouched, 2)
        assert torch.equal(generate(model, turn, cache, max_new_tokens=9).sequences, continued)
        assert same(cache, branch, 2) and cache.memory() == branch.memory()
    branch.release()
    untouched.release()


def test_a_deep_copy_holds_the_model_until_it_is_released_too(model):
    before = model.config._attn_implementation
    cache = BY_NAME["kivi-2-short"].open(model)
    branch = copy.deepcopy(cache)
    cache.release()
    assert model.config._attn_implementation != before
    assert generate(model, left_padded([9]), branch).sequences.shape == (1, 9 + NEW)
    branch.release()
    assert model.config._attn_implementation == before
    copy.deepcopy(branch)  # of a released cache: released as well
    assert model.config._attn_implementation == before


def test_drafts_are_copied_with_the_cache(model):
    cache, tokens = BY_NAME["kivi-2-short"].open(model), Tokens.random(model, 90, seed=1)
    cache.release()
    cache.activate_past_recording()
    feed(cache, [tokens])
    branch = copy.deepcopy(cache)
    cache.crop(-40)
    assert cache.sequences.lengths == [50] and branch.sequences.lengths == [0] and branch.sequences.unconfirmed == 90
    branch.crop(-30)
    assert cache.sequences.lengths == [50] and branch.sequences.lengths == [60]


@pytest.mark.arithmetic
@pytest.mark.parametrize("case", CASES, ids=str)
def test_everything_moves(model, case):
    cache, tokens = case.open(model), [Tokens.random(model, n, seed=n) for n in (200, 60)]
    cache.release()
    feed(cache, [row[:-1] for row in tokens])
    assert cache.to("cpu") is cache
    feed(cache, [row[-1:] for row in tokens])
    size = cache.memory()
    cache.to("meta")  # a device that every machine has
    # RoPE's frequencies stay on the CPU, which computes angles in float64; so do offloaded tokens.
    rotation = cache.compressed[0].context.rotation
    left = set() if rotation is None else {rotation.frequencies.data_ptr()}
    assert positions_but(left, cache, cache) == {"meta"}
    assert cache.memory().by_kind == size.by_kind | {"tables": cache.memory().by_kind["tables"]}


def positions_but(left: set[int], holder, cache) -> set[str]:
    """Device types of all tensors reachable from `holder`, except those at addresses in `left`, the artifact's, offloaded ones."""
    artifact = cache.origin.artifact
    left = left | {tensor.data_ptr() for tensor in ({} if artifact is None else artifact.tensors).values()}
    left = left | {
        part.untyped_storage().data_ptr()
        for layer in cache.compressed
        for part in layer.store.on_host()
        if part.device.type == "cpu"
    }
    return {
        t.device.type for t in tensors(holder) if t.device.type != "cpu" or t.untyped_storage().data_ptr() not in left
    }


def test_layers_of_a_group_share_their_dictionary_wherever_they_are(model):
    """The toy artifact has one dictionary for each layer's keys, and one for the values of all layers."""
    cache = BY_NAME["csr-offline"].open(model)
    cache.release()
    feed(cache, [Tokens.random(model, 60, seed=1)])
    for device in ("cpu", "meta", "meta"):
        cache.to(device)
        keys, values = (
            [getattr(layer.plan.tiers[0], role).codec.offline for layer in cache.compressed]
            for role in ("keys", "values")
        )
        assert len(set(map(id, values))) == 1 and len(set(map(id, keys))) == len(keys) == 2
        distinct = [keys[0], keys[1], values[0]]
        assert all(table.tensor.device.type == device for table in distinct)
        rest = cache.memory().by_kind["tables"] - sum(table.tensor.nbytes for table in distinct)
        assert 0 < rest < 1000  # tables of pages, and the frequencies of RoPE


def test_layers_that_are_not_compressed_move_along():
    model = random_model("qwen3-mixed")
    with BY_NAME["kivi-2-short"].open(model) as cache:
        generate(model, left_padded([100]), cache)
        cache.to(torch.device("meta"))
        assert {t.device.type for t in tensors(cache)} == {"meta"}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="moving between devices needs a CUDA device")
@pytest.mark.parametrize(
    "name",
    ["full", "kivi-2-short", "kivi-2-calibrated", "rtn-4", "zipcache-short", "zipcache-calibrated", "mikv-8-2", "h2o"],
)
def test_a_cache_follows_its_model_to_another_device(name):
    model, inputs = random_model("llama"), left_padded([150, 40])
    with BY_NAME[name].open(model) as cache:
        first = generate(model, inputs, cache, max_new_tokens=6).sequences
        mask = torch.cat([inputs["attention_mask"], torch.ones(2, 6, dtype=torch.long)], 1)
        expected = generate(model, {"input_ids": first, "attention_mask": mask}, copy.deepcopy(cache)).sequences
        cache.to("cuda")
        model.to("cuda")
        turn = {"input_ids": first.cuda(), "attention_mask": mask.cuda()}
        found = generate(model, turn, cache).sequences
    assert (found.cpu() == expected).float().mean() > 0.9


@pytest.mark.full
@pytest.mark.arithmetic
@pytest.mark.parametrize("case", [case for case in CASES if not case.on_host], ids=str)
def test_layers_may_lie_on_different_devices(model, case, monkeypatch):
    """The first layer is on the CPU, the second on the meta device, where operations with tensors of another device fail.

    A meta tensor has no values either that the host could read.
    """
    # In float16 no codec of 2 bits and more reads values to choose the width of its parameters: the meta device has none.
    model = random_model("llama", torch.float16) if case.tiered else model
    tokens = [Tokens.random(model, n, seed=n) for n in (330, 290)]
    for codec in (Exact, UniformQuant, Direction, DualScale):
        monkeypatch.setattr(codec, "fp32_params", lambda codec, x: False)
    split, whole = case.open(model), case.open(model)
    split.release()
    whole.release()
    for start, stop in ((0, 200), (200, 201), (201, 250), (250, 251), (251, 252)):
        part = [row[start:stop] for row in tokens]
        feed(whole, part)
        feed(split, part, devices=["cpu", "meta"])
    assert {t.device.type for t in tensors(vars(split.compressed[1].store) | {"sequences": None, "context": None})} == {
        "meta"
    }
    for row in range(2):
        assert not differing(stored(split, row, layers=[0]), stored(whole, row, layers=[0]), mass=0)


@pytest.mark.parametrize("order", ["interleaved", "nested"])
def test_two_live_caches_of_one_model(model, order):
    """One is used while the other is in the middle of a text; each gives the tokens that it gives alone."""
    inputs, alone = left_padded([140, 70]), {}
    for name in ("kivi-2-short", "rtn-4"):
        with BY_NAME[name].open(model) as cache:
            alone[name] = generate(model, inputs, cache).sequences
    assert not torch.equal(alone["kivi-2-short"], alone["rtn-4"])
    with BY_NAME["kivi-2-short"].open(model) as outer:
        start = generate(model, inputs, outer, max_new_tokens=5).sequences
        if order == "nested":
            with BY_NAME["rtn-4"].open(model) as inner:
                assert torch.equal(generate(model, inputs, inner).sequences, alone["rtn-4"])
        else:
            inner = BY_NAME["rtn-4"].open(model)
            part = generate(model, inputs, inner, max_new_tokens=5).sequences
        mask = torch.cat([inputs["attention_mask"], torch.ones(2, 5, dtype=torch.long)], 1)
        rest = generate(model, {"input_ids": start, "attention_mask": mask}, outer, max_new_tokens=NEW - 5)
        assert torch.equal(rest.sequences, alone["kivi-2-short"])
        if order == "interleaved":
            rest = generate(model, {"input_ids": part, "attention_mask": mask}, inner, max_new_tokens=NEW - 5)
            assert torch.equal(rest.sequences, alone["rtn-4"])
            inner.release()


# --- memory that is freed -----------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("case", CASES, ids=str)
def test_four_beams_hold_the_pages_of_a_prompt_once(model, case):
    """`generate` runs the prompt four times over; after the first choice of beams its pages are held once."""
    prompt, steps = 1000, 12
    with case.open(model) as single, case.open(model) as cache:
        model.generate(**left_padded([prompt]), past_key_values=single, max_new_tokens=steps, do_sample=False)
        model.generate(
            **left_padded([prompt]), past_key_values=cache, max_new_tokens=steps, num_beams=4, do_sample=False
        )
        allowed, rewritten = [], []
        for rows, tier, table in sequence_states(cache):
            size, (used, written) = table.page_tokens, pages_of_prompt(rows, tier, prompt)
            assert len(table.rows) == 4
            whole = 0 if written else used // size
            assert all(row[:whole] == table.rows[0][:whole] for row in table.rows)
            # Besides the shared pages each beam may have two of its own, where its text differs, and a little slack. A
            # tier whose slots are reused is not shared by beams.
            own = -(-used // size) if written else 2
            rewritten.append(written)
            allowed.append(whole + 4 * own + 4)
            assert table.capacity <= allowed[-1]
        if not case.tiered:
            assert whole >= 6
        memory = cache.memory()
    tables = zip(pool_bytes(single), single.sequences.all_tables, strict=True)
    weights = [weight / max(1, table.capacity) for weight, table in tables]  # a tier may hold no tokens yet
    used = sum(weight * count for weight, count in zip(weights, allowed, strict=True))
    assert sum(pool_bytes(cache)) <= used * (1 + MEMORY)
    # Where every slot is used again no page can be shared, and four beams are four times one.
    assert sum(pool_bytes(cache)) < 4 * sum(pool_bytes(single)) + all(rewritten)
    assert abs(memory.measured_bytes - memory.predicted_bytes) <= MEMORY * memory.predicted_bytes


def pages_of_prompt(rows, tier: int, prompt: int) -> tuple[int, bool]:
    """Tokens that a prompt puts into the pages of a table, and whether later ones are written over them."""
    if not isinstance(rows, TieredSequenceState):
        return rows.packed(prompt), False
    if tier == rows.stored:  # records: one for each row, of its first segment
        return 1, False
    return rows.held(0, prompt)[tier], rows.tiering.rewritten(tier)


def pool_bytes(cache) -> list[int]:
    """Bytes of the pages of each table, in all layers."""
    sizes = [0] * len(cache.sequences.all_tables)
    for layer in cache.compressed:
        for number, pools in enumerate(pools_of(layer.store)):
            sizes[number] += sum(tensor.nbytes for pool in pools for tensor in pool.tensors.values())
    return sizes


@pytest.mark.arithmetic
@pytest.mark.parametrize("name", ["kivi-2-short", "zipcache", "mikv-8-2", "streaming_llm"])
def test_rows_that_leave_take_their_pages_along(model, name):
    cache = BY_NAME[name].open(model)
    cache.release()
    tokens = [Tokens.random(model, 600, seed=row) for row in range(6)]
    feed(cache, [row[:-1] for row in tokens])
    before = cache.memory().measured_bytes
    cache.batch_select_indices(torch.tensor([4]))
    assert cache.memory().measured_bytes < before / 5
    feed(cache, [tokens[4][-1:]])
    alone = BY_NAME[name].open(model)
    alone.release()
    feed(alone, [tokens[4][:-1]])
    feed(alone, [tokens[4][-1:]])
    assert not differing(stored(cache, 0), stored(alone, 0))


@pytest.mark.full
@pytest.mark.arithmetic
@pytest.mark.parametrize("case", CASES, ids=str)
def test_rows_that_share_pages_numbered_anew_part_all_the_same(model, case):
    # Blocks of 20 and of 32 tokens close at 320.
    cache, tokens = case.open(model), [Tokens.random(model, 323, seed=row) for row in range(4)]
    cache.release()
    feed(cache, [row[:300] for row in tokens])
    capacities = [table.capacity for table in cache.sequences.all_tables]
    cache.reorder_cache(torch.tensor([2, 2, 2, 2]))
    for table, capacity in zip(cache.sequences.all_tables, capacities, strict=True):
        assert table.capacity < capacity / 2 or not capacity
    for at in range(300, 323):
        feed(cache, [row[at : at + 1] for row in tokens])
    for row in (0, 3):
        alone = case.open(model)
        alone.release()
        feed(alone, [tokens[2][:300]])
        for at in range(300, 323):
            feed(alone, [tokens[row][at : at + 1]])
        assert not differing(stored(cache, row), stored(alone, 0))
