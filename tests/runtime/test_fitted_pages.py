"""Short prompts of `full` and `rtn`: while no row has a second page, pages have only the slots that the longest row needs."""

import pytest
import torch
from layer_walk import Tokens, feed
from toy_models import random_model
from transformers import DynamicCache

from calib.runtime import compress
from calib.runtime.files.state import StateError
from calib.runtime.paging.page_numbers import PAGE_TOKENS
from calib.runtime.paging.pages import SLOT_STEP, PageTable


@pytest.mark.parametrize(
    ("tokens", "slots"), [(1, 16), (10, 16), (16, 16), (17, 32), (100, 112), (129, 256), (1000, 1024)]
)
@pytest.mark.parametrize("method", ["full", "rtn"])
def test_a_prompt_lies_in_no_more_slots_than_it_needs(method, tokens, slots):
    model = random_model("llama", torch.bfloat16)
    cache = compress(model, method)
    cache.release()
    feed(cache, [Tokens.random(model, tokens, seed=1)])
    memory = cache.memory()
    assert memory.measured_bytes == memory.predicted_bytes
    if method == "full":
        assert memory.measured_bytes * tokens == memory.dynamic_bytes * slots
    else:
        assert cache.sequences.table.page_tokens * cache.sequences.table.capacity == slots


@pytest.mark.full
@pytest.mark.parametrize("prompt", [1, 40])
def test_pages_are_doubled_while_a_row_grows_token_by_token(prompt):
    model = random_model("llama")
    tokens = torch.randint(3, model.config.vocab_size, (2, 300), generator=torch.Generator().manual_seed(1))
    dynamic, sizes = DynamicCache(config=model.config), []
    with compress(model, "full") as cache, torch.no_grad():
        for part in (tokens[:, :prompt], *tokens[:, prompt:].split(1, dim=1)):
            found = model(part, past_key_values=cache).logits
            sizes.append(cache.sequences.table.page_tokens)
            torch.testing.assert_close(found[:, -1], model_logits(model, part, dynamic), rtol=1e-4, atol=1e-4)
    first = -(-prompt // SLOT_STEP) * SLOT_STEP
    doubled = [size for size in (first, 2 * first, 4 * first, 8 * first) if size < PAGE_TOKENS]
    assert list(dict.fromkeys(sizes)) == [*doubled, PAGE_TOKENS]


def model_logits(model, part, cache):
    """Logits of the last token with another cache, by the model's sdpa attention."""
    ours = model.config._attn_implementation_internal
    model.config._attn_implementation_internal = "sdpa"
    try:
        return model(part, past_key_values=cache).logits[:, -1]
    finally:
        model.config._attn_implementation_internal = ours


def test_beams_share_a_short_page_and_get_their_own():
    model = random_model("llama")
    prompt = torch.randint(3, model.config.vocab_size, (1, 12), generator=torch.Generator().manual_seed(2))
    settings = {"max_new_tokens": 30, "num_beams": 3, "do_sample": False}
    expected = model.generate(prompt, **settings)
    with compress(model, "full") as cache:
        assert torch.equal(model.generate(prompt, past_key_values=cache, **settings), expected)


def test_a_file_says_how_long_its_pages_are_and_an_older_one_has_full_pages():
    table = PageTable(fitted=True)
    table.rows = [[]]
    table.fit(40)
    table.prepare(1)
    table.reserve(0, 1, [0])
    state = table.state()
    again = PageTable(fitted=True)

    def restore(table: PageTable, state: dict) -> None:
        table.restore_page_tokens(state)
        table.restore(state, [(len(pages), 0) for pages in state["rows"]], most=state["capacity"])

    restore(again, state)
    assert again.page_tokens == table.page_tokens == 48
    older = {name: value for name, value in state.items() if name != "page_tokens"}
    restore(again, older)
    assert again.page_tokens == PAGE_TOKENS
    for wrong in ({"page_tokens": 20}, {"page_tokens": 0}, {"page_tokens": 256}, {"rows": [[0, 0]]}):
        with pytest.raises(StateError, match="pages of"):
            restore(again, state | wrong)
    with pytest.raises(StateError, match="pages of 48 tokens, expected 128"):
        restore(PageTable(), state)
