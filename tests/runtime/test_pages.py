"""Pages and the page table: shared pages are copied before a write, and what is stored stays as it was stored."""

from collections.abc import Iterator

import oracle
import pytest
import torch
from cases import CASES
from host_waits import Operations
from layer_walk import Tokens, differing, feed, sequence_states, slots_of, stored
from tolerances import FLOAT32, STORED
from toy_models import random_model

from calib.runtime import compress
from calib.runtime.offload.store import OffloadStore
from calib.runtime.paging.field import Field
from calib.runtime.paging.forward import Forward
from calib.runtime.paging.page_numbers import EMPTY, PAGE_TOKENS
from calib.runtime.paging.pages import PageTable
from calib.runtime.paging.pool import PagePool
from calib.runtime.paging.token_runs import TokenRuns
from calib.runtime.paging.window import Window
from calib.runtime.tiered.sequence_state import TieredSequenceState
from calib.runtime.tiered.store import TieredStore

pytestmark = pytest.mark.arithmetic

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model():
    return random_model("llama")


def table_of(*lengths: int) -> PageTable:
    table = PageTable()
    table.rows = [[] for _ in lengths]
    for row, pages in enumerate(lengths):
        assert table.reserve(row, pages, range(pages)) == []
    return table


def test_every_page_has_one_owner_until_it_is_shared():
    table = table_of(3, 2)
    assert len({page for row in table.rows for page in row}) == 5
    assert max(max(row) for row in table.rows) < table.capacity


def test_a_shared_page_is_copied_before_it_is_written():
    table = table_of(3)
    original = list(table.rows[0])
    table.permute([0, 0])
    assert table.rows == [original, original]
    copies = table.reserve(0, 3, [2])  # only the page that is written
    assert copies == [(original[2], table.rows[0][2])]
    assert table.rows[0][:2] == original[:2] and table.rows[0][2] not in original
    assert table.rows[1] == original
    assert table.reserve(1, 3, [2]) == []  # the last holder writes in place


def test_pages_that_nobody_holds_are_used_again():
    table = table_of(4, 4)
    freed = set(table.rows[1])
    table.permute([0])
    capacity = table.capacity
    table.reserve(0, 4 + len(freed), range(4, 4 + len(freed)))
    assert freed <= set(table.rows[0]) and table.capacity == capacity


def test_pages_that_are_given_back_are_used_again_and_read_as_page_0():
    table = table_of(4, 2)
    gone = table.rows[0][:3]
    table.release(0, 3)
    assert table.rows[0][:3] == [EMPTY] * 3 and table.pages(0, 0, 6) == [0, 0, 0, table.rows[0][3], 0, 0]
    assert table.numbers(CPU).min() >= 0
    assert isinstance(table.select(range(1), 2, 4, CPU), torch.Tensor)  # never a slice that begins at no page
    capacity = table.capacity
    table.reserve(1, 5, range(2, 5))
    assert set(table.rows[1][2:]) == set(gone) and table.capacity == capacity
    table.release(0, 3)  # again: nothing more is given back
    table.reserve(1, 8, range(5, 8), first=6)
    assert table.rows[1][5] == EMPTY and table.capacity > capacity


def test_the_table_on_a_device_follows_the_rows():
    table = table_of(2, 1)
    assert table.numbers(CPU).tolist() == [table.rows[0], [*table.rows[1], 0]]
    table.reserve(1, 3, [1, 2])
    assert table.numbers(CPU).tolist() == [[*table.rows[0], 0], table.rows[1]]
    assert table.numbers(CPU).dtype == torch.int32
    assert table.predicted_bytes() == table.numbers(CPU).numel() * 4
    table.permute([1, 1, 0])
    assert table.numbers(CPU).tolist() == [table.rows[0], table.rows[1], [*table.rows[2], 0]]


def test_numbers_with_room_stay_where_they_are_while_rows_need_no_more():
    table = table_of(2, 1)
    room = table.numbers_with_room(CPU)
    assert room.tolist() == [table.rows[0], [*table.rows[1], 0]]
    table.reserve(1, 2, [1])
    table.renew()
    assert room.tolist() == table.rows
    table.reserve(0, 3, [2])
    table.renew()  # leaves a tensor that is too short
    assert room.shape == (2, 2)
    longer = table.numbers_with_room(CPU)
    assert longer.tolist() == [[*table.rows[0], 0], [*table.rows[1], 0, 0]]
    assert table.predicted_bytes() == longer.numel() * 4
    moves = table.moves
    table.permute([1, 0])
    assert table.moves > moves
    assert table.numbers_with_room(CPU) is longer
    assert longer.tolist() == [[*table.rows[0], 0, 0], [*table.rows[1], 0]]
    table.leave_devices()
    assert table.numbers_with_room(CPU) is not longer


@pytest.mark.parametrize("page_tokens", [16, 20, 64, 128])
def test_room_is_a_few_pages_more(page_tokens):
    table = PageTable(page_tokens)
    assert table.with_room(0) == 0
    for pages in range(1, 2000):
        room = table.with_room(pages)
        assert pages <= room == table.with_room(room)  # the same for all up to it
        assert (room - pages) * page_tokens < max(256, pages / 32 * page_tokens + 1)
        assert room <= table.with_room(pages + 1)


def test_growth_adds_at_most_a_sixteenth_and_keeps_the_content():
    table = table_of(0)
    pool = PagePool({"words": Field(1, 3, torch.int16, "codes")}, 2, CPU)
    for pages in range(1, 200):
        table.reserve(0, pages, [pages - 1])
        pool.grow(table.capacity)
        pool.tensors["words"][table.rows[0][-1]] = pages
        assert table.capacity <= pages + max(1, pages // 16)
    assert [int(pool.tensors["words"][page, 1, 5, 2]) for page in table.rows[0]] == list(range(1, 200))


@pytest.mark.parametrize("group", [1, 4, 32])
@pytest.mark.parametrize(("start", "count"), [(0, 32), (96, 64), (64, 640), (128, 256), (0, 512), (224, 32)])
def test_runs_land_where_the_table_says(group, start, count):
    pool = PagePool({"field": Field(group, 2, torch.int16, "codes")}, 3, CPU)
    pool.grow(9)
    pages = [4, 2, 7, 0, 8, 1]
    rows = torch.arange(3 * (count // group) * 2, dtype=torch.int16).view(3, count // group, 2) + 1
    pool.write_runs(TokenRuns([pages], [start]), {"field": rows[None]})
    for i in range(count // group):
        page, slot = divmod(start + i * group, PAGE_TOKENS)
        assert torch.equal(pool.tensors["field"][pages[page], :, slot // group], rows[:, i])
    assert int((pool.tensors["field"] != 0).sum()) == rows.numel()


@pytest.mark.parametrize("form", ["reference", "triton"])
@pytest.mark.parametrize(
    ("first", "count"),
    [
        ([0, 64, 96], 32),  # each in one page
        ([0, 96, 128], 64),  # one goes on in the next
        ([96, 224, 64], 160),
        ([0, 128, 32], 384),  # whole pages
        ([112, 16, 0], 16),
    ],
    ids=str,
)
def test_runs_of_several_rows_begin_anywhere(first, count, form, monkeypatch):
    """Written together they are as if written alone; fields hold one token or several a row, and some are shared by heads."""
    monkeypatch.setenv("CALIB_KERNELS", form)
    fields = {
        "tokens": Field(1, 5, torch.int16, "codes"),
        "groups": Field(16, 2, torch.float16, "parameters"),
        "shared": Field(1, 3, torch.int16, "codes", shared=True),
    }
    pages = [[4, 2, 7, 0, 8], [1, 3, 5, 6, 9], [14, 13, 12, 11, 10]]
    block = {
        name: torch.randn(3, 1 if field.shared else 2, count // field.tokens_per_row, field.width)
        .mul(99)
        .to(field.dtype)
        for name, field in fields.items()
    }
    together, alone = (PagePool(fields, 2, CPU) for _ in range(2))
    for pool in (together, alone):
        pool.grow(15)
    runs = TokenRuns(pages, first)
    together.write_runs(runs, block)
    for row in range(3):
        alone.write_runs(runs.of_row(row), {name: part[row : row + 1] for name, part in block.items()})
    for name, tensor in alone.tensors.items():
        assert int((tensor != 0).sum()) > block[name].numel() * 0.9 and torch.equal(together.tensors[name], tensor)


@pytest.mark.parametrize("pages", [slice(2, 4), torch.tensor([[2, 3]], dtype=torch.int32)], ids=["slice", "numbers"])
def test_a_tile_is_the_pages_tokens_last(pages):
    pool = PagePool(
        {"words": Field(1, 3, torch.int16, "codes"), "parameters": Field(32, 5, torch.half, "parameters")}, 2, CPU
    )
    pool.grow(6)
    for tensor in pool.tensors.values():
        tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape) % 2000)
    tile = pool.read(pages)
    for name, tokens in (("words", 1), ("parameters", 32)):
        for head in range(2):
            for i in range(2 * PAGE_TOKENS // tokens):
                page, slot = divmod(i, PAGE_TOKENS // tokens)
                assert torch.equal(tile[name][0, head, :, i], pool.tensors[name][2 + page, head, slot])


@pytest.mark.parametrize("form", ["reference", "triton"])
def test_exact_tokens_of_several_rows_are_copied_alone(form, monkeypatch):
    """No more elements are copied than the tile has, however many other pages there are, in any order of pages."""
    monkeypatch.setenv("CALIB_KERNELS", form)
    pool, pages = PagePool({"tokens": Field(1, 5, torch.float32, "exact")}, 2, CPU), torch.tensor([[5, 2], [7, 0]])
    pool.grow(40)
    held = pool.tensors["tokens"].copy_(torch.randn(40, 2, PAGE_TOKENS, 5))
    with Operations() as operations:
        tile = pool.read(pages.int())["tokens"]
    assert torch.equal(tile, held[pages].transpose(1, 2).flatten(2, 3).mT)
    assert operations.largest == tile.numel()


def test_a_window_with_room_is_saved_as_one_without():
    like, tokens = torch.zeros(2, 1, 0, 3), torch.randn(2, 1, 40, 3)
    plain, roomy = Window(100, like), Window(100, like, keeps_room=True)
    for window in (plain, roomy):
        window.resize(40)
        window.write([0, 1], 0, tokens)
    assert (plain.tokens.shape[2], roomy.tokens.shape[2]) == (64, 100)
    assert torch.equal(plain.state(40)["tokens"], roomy.state(40)["tokens"])
    for window in (plain, roomy):
        again = Window(100, like, window.keeps_room)
        again.restore(plain.state(40), 40)
        assert torch.equal(again.tokens, window.tokens)
    roomy.resize(0)
    assert roomy.tokens.shape[2] == 100


def test_a_window_is_a_ring():
    window = Window(5, torch.zeros(2, 1, 0, 3))
    window.resize(5)
    tokens = torch.arange(2 * 9 * 3, dtype=torch.float32).view(2, 1, 9, 3)
    window.write([0, 1], 0, tokens[:, :, :5])
    window.write([1], 5, tokens[1:, :, 5:8])
    assert torch.equal(window.in_order([0], 0, 5), tokens[:1, :, :5])
    assert torch.equal(window.in_order([1], 3, 8), tokens[1:, :, 3:8])
    window.permute(torch.tensor([1, 1, 0]))
    assert torch.equal(window.in_order([0, 1], 3, 8), tokens[[1, 1], :, 3:8])
    assert torch.equal(window.in_order([2], 0, 5), tokens[:1, :, :5])


@pytest.mark.full
@pytest.mark.parametrize("case", CASES, ids=str)
def test_stored_words_never_change(model, case):
    """Encoded tokens keep every bit, and so do the numbers they were encoded with. Reused slots hold other tokens later; a
    token that is still in a tier has kept its bits."""
    cache, tokens = case.open(model), Tokens.random(model, 420, seed=7)
    cache.release()
    before: dict[str, torch.Tensor] = {}
    at, written, measured = 0, written_over(cache), 0
    for stop in [100, 101, 120, 133, *range(134, 170), 300, 400, *range(401, 420)]:
        feed(cache, [tokens[at:stop]])
        now = stored(cache, 0)
        for name, part in before.items():
            if "window" in name or name.endswith("mass") or not part.shape[1]:
                continue
            if any(f"{tier}." in name for tier in written):
                kept_by_position(case, name, (before, at), (now, stop))
            else:
                assert torch.equal(now[name][:, : part.shape[1]], part), (name, stop)
                measured += case.tiered and "tier" not in name
        before, at = now, stop
    if case.tiered:
        assert measured or not any(transform.measured for transform in cache.compressed[0].store.transforms.values())
    for name, part in before.items():
        stream = "keys" if "keys" in name else "values"
        expected = getattr(tokens, stream)[int(name[0])]
        if "window" in name and part.shape[1]:
            store = cache.compressed[0].store
            first = oracle.kept_first(store) if isinstance(store, TieredStore) else 0
            newest = expected[:, at - part.shape[1] + first : at]
            assert torch.equal(part, torch.cat([expected[:, :first], newest], 1))


def written_over(cache) -> list[str]:
    """Names of the tiers whose slots are used again."""
    if not isinstance(cache.sequences, TieredSequenceState):
        return []
    return [f"tier {tier}" for tier in range(cache.sequences.stored) if cache.sequences.tiering.rewritten(tier)]


def kept_by_position(case, name: str, *moments: tuple[dict[str, torch.Tensor], int]) -> None:
    """Asserts that a token that is in a tier at both moments (what is stored, tokens so far) has the same bits, whatever its
    slot, and that each new token evicts one at most."""
    tier, field = ".".join(name.split(".")[:2]), [fields[name] for fields, _ in moments]
    for head in range(2):
        held = []
        for fields, length in moments:
            if case.method == "streaming_llm":  # a ring behind 4 sinks
                size = case.options["window"]
                held.append([slot + (length - 5 - slot) // size * size + 4 for slot in range(fields[name].shape[1])])
            else:
                held.append(fields[f"{tier}.positions"][head, :, 0].tolist())
        common = sorted(set(held[0]) & set(held[1]))
        assert len(common) >= len(held[0]) - (moments[1][1] - moments[0][1])
        old, new = ([positions.index(position) for position in common] for positions in held)
        assert torch.equal(field[0][head, old], field[1][head, new])


@pytest.mark.full
@pytest.mark.parametrize("case", CASES, ids=str)
def test_beams_share_pages_until_they_part(model, case):
    """Copy on write seen from outside: each row holds what it would hold alone, and full pages are counted once."""
    cache = case.open(model)
    cache.release()
    prompt = Tokens.random(model, 300, seed=8)
    feed(cache, [prompt])
    used = held_pages(cache)
    cache.batch_repeat_interleave(3)
    assert held_pages(cache) == used
    brought = [[prompt] for _ in range(3)]
    for step, order in enumerate(
        [[0, 1, 2], [2, 0, 0], [0, 0, 1], [1, 2, 0]] * 11
    ):  # a block of 40 closes, and two of 20
        cache.reorder_cache(torch.tensor(order))
        brought = [list(brought[source]) for source in order]
        new = [Tokens.random(model, 1, seed=100 + 3 * step + row) for row in range(3)]
        feed(cache, new)
        for row, token in enumerate(new):
            brought[row].append(token)
    for rows, tier, table in sequence_states(cache):
        full_pages = full_pages_of_prompt(rows, tier)
        assert all(table.rows[0][:full_pages] == row[:full_pages] for row in table.rows)
    for row, pieces in list(enumerate(brought))[:2]:
        alone = case.open(model)
        alone.release()
        for piece in pieces:
            feed(alone, [piece])
        assert not differing(stored(cache, row), stored(alone, 0))


def held_pages(cache) -> list[set[int]]:
    """Page numbers in use, of each table."""
    return [{page for row in table.rows for page in row} for table in cache.sequences.all_tables]


def full_pages_of_prompt(rows, tier: int) -> int:
    """Pages of a table that a prompt of 300 tokens has filled for good."""
    if not isinstance(rows, TieredSequenceState):
        return rows.packed(300) // PAGE_TOKENS
    if tier == rows.stored:  # records
        return 1
    page = rows.tables[tier].page_tokens
    return 0 if rows.tiering.rewritten(tier) else rows.held(0, 300)[tier] // page


@pytest.mark.full
@pytest.mark.parametrize("case", CASES, ids=str)
def test_decoding_by_the_codec_and_by_the_oracle_agree(case, model):
    cache = case.open(model)
    cache.release()
    feed(cache, [Tokens.random(model, 300, seed=9)])
    for layer in cache.compressed:
        held = oracle.held_tokens(layer, 0)
        for role in ("keys", "values"):
            found = torch.cat(list(decoded(layer.store, role)), 1)
            expected = getattr(held, role)[:, : found.shape[1]]
            torch.testing.assert_close(found.double(), expected, rtol=FLOAT32, atol=STORED)
            assert found.shape[1] > 0


def decoded(store, role: str) -> Iterator[torch.Tensor]:
    """What the pages of the first row hold, by the stages themselves: `[kv_heads, tokens, head_dim]` of each tier."""
    store = store.low if isinstance(store, OffloadStore) else store
    if isinstance(store, TieredStore):
        for keys, values in store.decoded(0):
            yield keys if role == "keys" else values
        return
    (stream,) = (stream for stream in store.streams if stream.role == role)
    count = stream.plan.schedule.packed(300)
    block = {
        name: slots_of(tensor, store.sequences.table, 0)[:, : count // stream.pool.fields[name].tokens_per_row]
        for name, tensor in stream.pool.tensors.items()
    }
    yield stream.plan.transform.inverse(stream.plan.codec.decode(block, stream.head_dim))


@pytest.mark.parametrize("method", ["zipcache", "h2o"])
def test_slots_are_those_of_rows_that_were_exchanged(method, model):
    """Two rows of one length with different prompts are exchanged between two forwards: the slots that the first ended with must
    not be reused for the second."""
    with compress(model, method) as cache:
        rows = cache.sequences
        rows.prompts = [90, 150]
        forward = Forward([150, 150], [1, 1], None, 1, 1)
        _, before = rows.slots(forward)
        rows.prompts = [150, 90]
        after, _ = rows.slots(Forward([151, 151], [1, 1], None, 1, 1))
        assert before.held[0] != before.held[1]
        assert (after.held, after.exact) == (before.held[::-1], before.exact[::-1])


@pytest.mark.parametrize("method", ["zipcache", "h2o", "mikv", "streaming_llm", "snapkv", "infllm", "gear"])
def test_slots_of_steps_that_follow_are_those_of_their_lengths(method, model):
    """Slots that follow from the step before equal those that the tiering gives for each length, for rows with different prompts,
    beyond blocks, budgets and pages."""
    prompts = [70, 61, 250]
    with compress(model, method) as cache:
        rows, lengths = cache.sequences, list(prompts)
        rows._open(len(prompts))
        rows.prompts, followed = prompts, 0
        for _ in range(300):
            before, after = rows.slots(Forward(lengths, [1] * 3, None, 1, 1))
            assert (before.held, before.exact) == _slots_of(rows, lengths)
            lengths = [length + 1 for length in lengths]
            assert (after.held, after.exact) == _slots_of(rows, lengths)
            assert after.pages == tuple(rows.pages_of(row, length) for row, length in enumerate(lengths))
            followed += before.steps > 0
        assert followed > 200


def _slots_of(rows, lengths):
    """Slots held in each tier and exact tokens of each row, from the tiering."""
    spans = list(zip(lengths, rows.prompts, strict=True))
    return [rows.tiering.held(*span)[: rows.stored] for span in spans], [rows.tiering.exact(*span) for span in spans]
