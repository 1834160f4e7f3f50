"""Bytes: predicted against every tensor the cache holds, by kind, per value; and no memory outside the cache grows."""

import pytest
import torch
from cases import BY_NAME, CASES, Case
from in_turn import in_turn
from layer_walk import Tokens, feed, sequence_states
from live_tensors import live_tensors
from tolerances import MEMORY
from toy_models import left_padded, random_model

from calib.runtime import Artifact, compress


def held_bytes(holder) -> int:
    """Bytes of every distinct storage reachable from an object, whatever holds it: the tests' own walk. An artifact does not
    count; what a cache uses of it is held by the cache as well."""
    storages, seen, waiting = {}, set(), [holder]
    while waiting:
        thing = waiting.pop()
        if id(thing) in seen or isinstance(thing, torch.nn.Module | type | Artifact):
            continue
        seen.add(id(thing))
        if isinstance(thing, torch.Tensor):
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
            waiting.append(thing.grad_fn)
        elif isinstance(thing, dict):
            waiting.extend([*thing.keys(), *thing.values()])
        elif isinstance(thing, list | tuple | set | frozenset):
            waiting.extend(thing)
        elif hasattr(thing, "__dict__"):
            waiting.extend(vars(thing).values())
    return sum(storages.values())


def host_bytes(cache) -> int:
    """Bytes of the pages of exact tokens in host memory: all pages of the last state's table, keys and values."""
    if cache.method not in ("infllm", "offload", "specache"):
        return 0
    (layer, *_), (*_, (_, _, table)) = cache.compressed, sequence_states(cache)
    if layer.store is None:
        return 0
    return (
        len(cache.compressed)
        * table.capacity
        * table.page_tokens
        * layer.store.footprint().values
        * layer.dtype.itemsize
    )


def check(cache) -> None:
    memory = cache.memory()
    assert memory.measured_bytes + memory.host_bytes == held_bytes(cache)
    assert abs(memory.measured_bytes - memory.predicted_bytes) <= MEMORY * memory.predicted_bytes
    assert sum(memory.by_kind.values()) == memory.predicted_bytes
    assert memory.host_bytes == host_bytes(cache)
    seen = sum(cache.sequences.lengths)
    model_values = sum(layer.store.footprint().values for layer in cache.compressed if layer.store is not None)
    if seen:
        assert memory.bits_per_value == pytest.approx(8 * memory.measured_bytes / (model_values * seen))


@pytest.mark.arithmetic
@pytest.mark.parametrize(("case", "dtype"), in_turn(CASES, [torch.float32, torch.bfloat16]))
def test_measured_is_predicted_at_every_length(case, dtype):
    model = random_model("llama", dtype)
    tokens = Tokens.random(model, 420, seed=1)
    cache = case.open(model)
    cache.release()
    check(cache)  # nothing is held yet but an artifact's tables
    at = 0
    for stop in (1, 2, 31, 32, 33, 127, 128, 129, 160, 161, 255, 256, 257, 400):
        feed(cache, [tokens[at:stop]])
        at = stop
        check(cache)
    for at in range(400, 420):
        feed(cache, [tokens[at : at + 1]])
        check(cache)


@pytest.mark.arithmetic
@pytest.mark.parametrize(
    ("case", "lengths"),
    in_turn(CASES, [[1], [700], [5, 300], [128, 128, 128], [2, 31, 400, 129], [200] * 5], taken=2),
)
def test_measured_is_predicted_for_every_batch(case, lengths):
    model = random_model("llama", torch.bfloat16)
    cache = case.open(model)
    cache.release()
    feed(cache, [Tokens.random(model, length, seed=length) for length in lengths])
    check(cache)
    feed(cache, [Tokens.random(model, 1, seed=length) for length in lengths])
    check(cache)
    cache.batch_repeat_interleave(2)
    check(cache)
    cache.batch_select_indices(torch.tensor([0]))
    check(cache)
    feed(cache, [Tokens.random(model, 1, seed=3)])
    check(cache)
    cache.reset()
    check(cache)


@pytest.mark.parametrize("name", ["kivi-2-short", "zipcache-short", "mikv-16-2"])
def test_measured_is_predicted_in_a_model_of_both_kinds_of_layers(name):
    model, text = random_model("qwen3-mixed", torch.bfloat16), left_padded([60])["input_ids"].repeat(1, 4)
    # The sliding layer keeps 47 tokens of each row, 2 heads and 32 channels exact; of a step it may hold 48.
    window = 2 * 2 * 47 * 32 * 2
    with BY_NAME[name].open(model) as cache:

        def check_share(rows: int) -> None:
            memory = cache.memory()
            assert memory.measured_bytes == held_bytes(cache)
            assert abs(memory.measured_bytes - memory.predicted_bytes) <= MEMORY * memory.predicted_bytes
            assert memory.by_kind["uncompressed"] == rows * window
            assert (memory.compressed_layers, memory.layers) == (1, 2)
            assert str(memory).endswith("; 1 of 2 layers are compressed, the others stay as transformers keeps them")

        model(**left_padded([100, 200]), past_key_values=cache)
        check_share(2)  # after a prompt as well, whose other tokens are gone
        cache.reset()
        model.generate(**left_padded([100, 200]), past_key_values=cache, max_new_tokens=5, do_sample=False)
        check_share(2)
        cache.reset()
        model.generate(text, past_key_values=cache, max_new_tokens=9, do_sample=False, prompt_lookup_num_tokens=5)
        check_share(1)


@pytest.mark.arithmetic
@pytest.mark.parametrize("by_steps", [False, True], ids=["at once", "token by token"])
def test_2_bit_at_2048_tokens_is_at_most_24_percent_of_16_bit(by_steps):
    model = random_model("llama-64", torch.bfloat16)
    with compress(model, method="kivi", bits=2, group=32, residual=128) as cache:
        tokens = Tokens.random(model, 2048, seed=2)
        feed(cache, [tokens[: 1800 if by_steps else 2048]])
        for at in range(1800, 2048) if by_steps else ():
            feed(cache, [tokens[at : at + 1]])
        memory = cache.memory()
    full = 2 * 2 * 2 * 64 * 2048 * 2  # streams, layers, heads, channels, tokens, bytes
    assert memory.measured_bytes <= 0.24 * full
    assert memory.bits_per_value == pytest.approx(16 * memory.measured_bytes / full)


@pytest.mark.full
@pytest.mark.arithmetic
@pytest.mark.parametrize("case", CASES, ids=str)
def test_one_more_token_costs_what_the_method_promises(case):
    model = random_model("llama-64", torch.bfloat16)
    cache = case.open(model)
    cache.release()
    feed(cache, [Tokens.random(model, 300, seed=4)])
    assert cache.memory().marginal_bits == pytest.approx(case.marginal_bits)
    # The documented number against storage: two lengths at which pages are as full, and every window holds the same. The
    # prompt is the same too, because budgets and the first chunk follow from it.
    prompt, apart = (
        128,
        15 * 128,
    )  # all windows and blocks of the table divide both, and they fill whole pages of a tier
    sizes = []
    for more in (apart, 2 * apart):
        cache.reset()
        tokens = Tokens.random(model, prompt + more, seed=5)
        # Oracle eviction has no budget, and sorts all logits of what comes after a prompt.
        for part in [tokens] if case.method == "oracle" else [tokens[:prompt], tokens[prompt:]]:
            feed(cache, [part])
        sizes.append(cache.memory().measured_bytes)
    values = 2 * 2 * 2 * 64 * apart  # streams, layers, heads, channels
    assert 8 * (sizes[1] - sizes[0]) / values == pytest.approx(case.marginal_bits, rel=MEMORY, abs=0)


@pytest.mark.arithmetic
def test_a_longer_cache_is_lighter_a_value():
    model = random_model("llama-64", torch.bfloat16)
    cache = compress(model, method="kivi", bits=2)
    cache.release()
    assert cache.memory().bits_per_value == 0
    weights = []
    for _ in range(6):
        feed(cache, [Tokens.random(model, 128, seed=6)])
        weights.append(cache.memory().bits_per_value)
    assert weights == sorted(weights, reverse=True) and weights[-1] < 6 < weights[0]


GROWING = ["full", "kivi-2-short", "rtn-4", "zipcache", "mikv-8-2", "h2o", "streaming_llm", "oracle"]


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "grad"),
    [*((name, False) for name in GROWING), *((name, True) for name in GROWING[:5])],
    ids=lambda part: {False: "no_grad", True: "with grad"}.get(part, part),
)
def test_nothing_but_the_cache_grows(name, grad):
    model, inputs, beside, objects = random_model("llama", num_hidden_layers=1), left_padded([40, 90]), [], []
    with BY_NAME[name].open(model) as cache, torch.set_grad_enabled(grad):
        model(**inputs, past_key_values=cache)
        token = inputs["input_ids"][:, -1:]
        for step in range(300):
            model(token, past_key_values=cache)
            if step in (50, 170, 290):  # a step after the last block of any method, so that all tables are uploaded
                tensors, size = live_tensors()
                beside.append(size - cache.memory().measured_bytes)
                objects.append(tensors)
    assert beside[0] == beside[1] == beside[2]
    assert objects[0] == objects[1] == objects[2]


def test_the_report_reads_as_a_line():
    model = random_model("llama-64", torch.bfloat16)
    cache = Case("kivi", "kivi", 3.0, {"bits": 2}).open(model)
    cache.release()
    feed(cache, [Tokens.random(model, 512, seed=4)])
    memory = cache.memory()
    text = str(memory)
    assert "\n" not in text
    for part in (
        f"{memory.measured_bytes:,} bytes measured",
        f"{memory.predicted_bytes:,} predicted",
        "3.00 marginal bits",
    ):
        assert part in text
