"""Decode steps replayed from (simulated) CUDA graphs: tokens and stored codes are those of steps that run one by one."""

import copy

import pytest
import torch
from cases import BY_NAME, CASES, Case, calibrated_artifact
from step_tape import Tape
from toy_models import left_padded, random_model

from calib.runtime import compress
from calib.runtime.graphs import step_graphs
from calib.runtime.paging.page_numbers import EMPTY

LENGTHS = [9, 70]
STEPS = 150  # beyond every block and window of the cases

# Cases that encode a token in every step.
NONE_YET = {"csr-paper", "kvquant", "kvquant-3-dense", "oscar", "oscar-4-groups"}
# Methods whose steps are never replayed: with host memory, and oracle eviction.
NEVER = {"infllm", "offload", "oracle", "specache"}


@pytest.fixture(autouse=True)
def recorded_on_the_host(monkeypatch):
    monkeypatch.setattr(step_graphs, "recorder", lambda device: Tape)
    monkeypatch.setenv("CALIB_KERNELS", "reference")  # an interpreted kernel is no operation of torch


def decoded(model, cache, inputs, steps: int):
    """Greedy tokens of `steps` steps, and the last logits."""
    mask, tokens = inputs["attention_mask"], []
    with torch.no_grad():
        token = model(**inputs, past_key_values=cache).logits[:, -1:].argmax(-1)
        for _ in range(steps):
            mask = torch.nn.functional.pad(mask, (0, 1), value=1)
            positions = mask.sum(-1, keepdim=True) - 1
            logits = model(input_ids=token, attention_mask=mask, position_ids=positions, past_key_values=cache).logits
            token = logits[:, -1:].argmax(-1)
            tokens.append(token)
    return torch.cat(tokens, 1), logits


def contents(cache) -> list[dict[str, torch.Tensor]]:
    """Tensors of everything in pages that rows hold, in their order, by layer."""
    found, tables = [], cache.sequences.tables
    for layer in cache.compressed:
        store = layer.store
        pools = (
            [(stream.pool, tables[0]) for stream in store.streams]
            if hasattr(store, "streams")
            else [(tier.pool, table) for tier, table in zip(store.tiers, tables, strict=False)]
        )
        found.append(
            {
                f"{i} {name}": tensor[[page for row in table.rows for page in row if page != EMPTY]]
                for i, (pool, table) in enumerate(pools)
                for name, tensor in pool.tensors.items()
            }
        )
    return found


def cases() -> list[object]:
    """Not marked slow are one case of each method and the contract's cases; with a sliding window the contract's alone."""
    seen, found = set(), []
    for case in CASES:
        quick = case.method not in NEVER and (case.method not in seen or case.contract)
        seen.add(case.method)
        for family, soon in (("llama", quick), ("mistral-sliding", quick and case.contract)):
            marks = () if soon else pytest.mark.slow
            found.append(pytest.param(case, family, id=f"{case.name}-{family}", marks=marks))
    return found


@pytest.mark.full
@pytest.mark.parametrize(("case", "family"), cases())
def test_replayed_steps_are_those_that_run_one_by_one(case: Case, family: str):
    model, inputs = random_model(family), left_padded(LENGTHS)
    with case.open(model) as cache:
        tokens, logits = decoded(model, cache, inputs, STEPS)
        plain = [] if case.method in NEVER else contents(cache)
    with case.open(model, graphs=True) as cache:
        replayed, last = decoded(model, cache, inputs, STEPS)
        assert cache.sequences.lengths == [length + STEPS for length in LENGTHS]
        assert {layer.get_seq_length() for layer in cache.compressed} == {max(LENGTHS) + STEPS}
        assert not cache.graphs.refused
        assert torch.equal(replayed, tokens)
        torch.testing.assert_close(last, logits, rtol=1e-3, atol=1e-3)
        if case.method in NEVER:
            assert not cache.graphs.replays
            return
        assert cache.graphs.replays > STEPS // 4 or case.name in NONE_YET
        for number, (own, other) in enumerate(zip(contents(cache), plain, strict=True)):
            for name, tensor in own.items():
                if not tensor.dtype.is_floating_point:
                    # Inputs of deeper layers differ in their last bits (sums of other shapes): of two equally good atoms a
                    # pursuit may then choose the other.
                    unequal = int((tensor != other[name]).sum())
                    assert unequal <= (tensor.numel() // 100 if number else 0), name


@pytest.mark.full
@pytest.mark.parametrize(
    ("method", "options", "lengths", "count"),
    [
        ("rtn", {"bits": 4}, [115, 187], 150),  # the shorter row takes a page beyond those that there are in step 141
        ("full", {}, [115, 187], 150),
        ("mikv", {}, [115, 187], 115),
        ("snapkv", {}, [115, 187], 225),
        ("mikv", {}, [639], 8),  # the recorded step takes a page beyond the room
    ],
)
def test_a_row_takes_a_page_that_is_not_there_yet(model, method, options, lengths, count):
    """Pools grow in steps that run one by one; a replay would write beyond their end."""
    inputs, found = left_padded(lengths), []
    for graphs in (False, True):
        with compress(model, method, graphs=graphs, **options) as cache:
            found.append(decoded(model, cache, inputs, count))
            assert not graphs or (cache.graphs.replays > count // 2 - 2 and not cache.graphs.refused)
    assert torch.equal(found[0][0], found[1][0])
    alike([found[0][1]], [found[1][1]])


@pytest.mark.full
@pytest.mark.parametrize("graphs", [True, False], ids=["replayed", "launched again"])
@pytest.mark.parametrize("lengths", [[176], [107, 595]], ids=str)
def test_a_sliding_window_has_given_back_every_page(lengths, graphs, monkeypatch):
    """Keys were packed before their values, and both are outside the window: there is no page to read."""
    model, inputs = random_model("mistral-sliding"), left_padded(lengths)
    with compress(model, "kivi", bits=4) as cache:
        tokens, logits = decoded(model, cache, inputs, 4)
    assert not cache.sequences.tables[0].capacity
    monkeypatch.setenv("CALIB_KERNELS", "reference" if graphs else "triton")
    with compress(model, "kivi", bits=4, graphs=graphs) as cache:
        again, last = decoded(model, cache, inputs, 4)
        assert not graphs or cache.graphs.replays
    assert torch.equal(again, tokens)
    alike([last], [logits])


def steps(model, cache, count: int, **named) -> list[torch.Tensor]:
    """Logits of steps whose tokens are 1, 2, 3 and so on, in every row."""
    rows = len(cache.sequences.lengths)
    with torch.no_grad():
        return [
            model(input_ids=torch.full((rows, 1), 1 + i), past_key_values=cache, **named).logits for i in range(count)
        ]


@pytest.fixture
def model():
    return random_model("llama")


def prompt(rows: int = 2, length: int = 40) -> torch.Tensor:
    return torch.randint(1, 100, (rows, length), generator=torch.Generator().manual_seed(5))


def both(model, what, method: str = "kivi", **options):
    """What `what(cache)` returns for a cache whose steps are replayed, and for one whose are not."""
    found = []
    for graphs in (True, False):
        with compress(model, method, graphs=graphs, **options) as cache, torch.no_grad():
            model(input_ids=prompt(), past_key_values=cache)
            found.append(what(cache))
            if graphs:
                assert cache.graphs.replays > 3
    return found


def alike(one, other) -> None:
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


def test_positions_are_counted_where_nobody_tells_them(model):
    alike(*both(model, lambda cache: steps(model, cache, 12)))


def test_ids_without_their_name(model):
    """`model(token, past_key_values=cache)`, as a loop of one's own calls it."""

    def run(cache):
        return [model(torch.full((2, 1), 1 + i), past_key_values=cache).logits for i in range(12)]

    alike(*both(model, run))


def test_answers_are_their_own(model):
    """A replay writes to the memory that the last one wrote to; logits that a caller holds must not change."""

    def run(cache):
        held = steps(model, cache, 8)
        copies = [logits.clone() for logits in held]
        steps(model, cache, 4)
        assert all(torch.equal(a, b) for a, b in zip(held, copies, strict=True))
        return held

    alike(*both(model, run))


def test_hidden_states_are_answers_too(model):
    def run(cache):
        with torch.no_grad():
            outputs = [
                model(input_ids=torch.full((2, 1), i), past_key_values=cache, output_hidden_states=True)
                for i in range(8)
            ]
        return [states for output in outputs for states in output.hidden_states]

    alike(*both(model, run))


@pytest.mark.full
@pytest.mark.parametrize("method", ["kivi", "zipcache", "mikv"])
def test_beams_copies_and_chunks_in_between(model, method):
    def run(cache):
        found = steps(model, cache, 6)
        cache.reorder_cache(torch.tensor([1, 1]))
        found += steps(model, cache, 6)
        copied = copy.deepcopy(cache)
        found += steps(model, copied, 6)
        with torch.no_grad():
            found.append(model(input_ids=prompt(2, 7), past_key_values=cache).logits)
        found += steps(model, cache, 6)
        copied.release()
        return found

    alike(*both(model, run, method))


@pytest.mark.full
@pytest.mark.parametrize("method", ["kivi", "zipcache", "gear"])
def test_a_copy_behind_every_step(model, method):
    """After steps that run as always, that are recorded and that are replayed: each copy continues as the cache does."""
    with compress(model, method, graphs=True) as cache, torch.no_grad():
        model(input_ids=prompt(), past_key_values=cache)
        for i in range(30):
            with copy.deepcopy(cache) as copied:
                alike(steps(model, copied, 1), steps(model, cache, 1))
                assert not copied.graphs.replays, i
        assert cache.graphs.replays > 20


def test_a_cache_that_is_reset_starts_anew(model):
    def run(cache):
        steps(model, cache, 6)
        cache.reset()
        with torch.no_grad():
            model(input_ids=prompt(1, 30), past_key_values=cache)
        return steps(model, cache, 8)

    alike(*both(model, run))


def test_inference_mode_and_back(model):
    def run(cache):
        with torch.inference_mode():
            found = steps(model, cache, 6)
        return [logits.clone() for logits in found] + steps(model, cache, 6)

    alike(*both(model, run))


def test_embeddings_instead_of_ids(model):
    def run(cache):
        embedded = model.get_input_embeddings()(prompt(2, 9))
        return [
            model(inputs_embeds=embedded[:, i : i + 1], past_key_values=cache).logits for i in range(embedded.shape[1])
        ]

    alike(*both(model, run))


@pytest.mark.full
@pytest.mark.parametrize("method", ["mikv", "h2o"])
def test_a_budget_that_becomes_full(model, method):
    """From then on every step evicts a token, so that another step must be recorded."""
    sizes = {"mikv": {"budget": 100, "recent": 20}, "h2o": {"heavy": 40, "recent": 20}}[method]
    alike(*both(model, lambda cache: steps(model, cache, 80), method, **sizes))


@pytest.mark.full
def test_a_recorded_step_serves_behind_one_that_encodes_into_memory_that_is_there(model):
    """Logits are those of steps that run one by one; of 55 steps all are replayed but two and those that encode blocks of 8."""
    logits = []
    for graphs in (False, True):
        with BY_NAME["klt-short"].open(model, graphs=graphs) as cache, torch.no_grad():
            model(input_ids=prompt(), past_key_values=cache)
            logits.append(torch.cat(steps(model, cache, 55), 1))
    assert cache.graphs.replays == 55 - 2 - 55 // 8
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-3, atol=1e-3)


class Nothing:
    """Stands for a graph whose replays do nothing."""

    def __init__(self, step):
        self.result = step()

    def replay(self):
        """No launch."""


@pytest.mark.full
@pytest.mark.parametrize(
    ("method", "others"), [("rtn", 5), ("kivi", 11), ("gear", 19), ("zipcache", 6), ("mikv", 5), ("h2o", 2)]
)
def test_most_steps_are_replayed(model, method, others, monkeypatch):
    """Of 260 steps after ragged prompts at most `others` are not: two of each block, and those that encode tokens of a row.
    Neither another page nor a longer window ends a block."""
    monkeypatch.setattr(step_graphs, "recorder", lambda device: Nothing)
    with compress(model, method, graphs=True) as cache, torch.no_grad():
        model(**left_padded([140, 137, 132]), past_key_values=cache)
        for _ in range(260):
            token, positions = torch.ones(3, 1, dtype=torch.int64), torch.tensor(cache.sequences.lengths)[:, None]
            model(input_ids=token, position_ids=positions, past_key_values=cache)
        assert cache.graphs.replays >= 260 - others


@pytest.mark.full
@pytest.mark.parametrize("method", ["kivi", "zipcache", "klt-short"])
def test_a_prefix_is_the_same_with_graphs_and_without(model, method, tmp_path):
    """With graphs memory for a whole window and some more pages is allocated, which the predicted bytes include."""
    case, path, found = BY_NAME.get(method), tmp_path / "prefix.safetensors", []
    artifact = calibrated_artifact(model) if case is not None else None
    named = {"artifact": artifact, **(case.options if case else {})}
    for graphs in (True, False):
        with compress(model, method.split("-")[0], graphs=graphs, **named) as cache, torch.no_grad():
            model(**left_padded([40, 33]), past_key_values=cache)
            steps(model, cache, 30, position_ids=torch.tensor([[50], [43]]))
            cache.save(path)
            memory = cache.memory()
            assert memory.measured_bytes == pytest.approx(memory.predicted_bytes, rel=0.01)
        for again in (True, False):
            with compress(model, method.split("-")[0], graphs=again, prefix=path, **named) as cache:
                found.append(torch.cat(steps(model, cache, 40, position_ids=torch.tensor([[90], [83]])), 1))
                assert not again or cache.graphs.replays > 20
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-3, atol=1e-3)


def test_gradients_are_not_replayed(model):
    with compress(model, "kivi", graphs=True) as cache, torch.enable_grad():
        model(input_ids=prompt(), past_key_values=cache)
        for _ in range(6):
            model(input_ids=torch.ones(2, 1, dtype=torch.int64), past_key_values=cache)
        assert not cache.graphs.replays


@pytest.mark.parametrize(
    "strategy", [{}, {"do_sample": True}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 3}], ids=str
)
def test_generate(model, strategy):
    found = []
    ids = prompt(1 if "prompt_lookup_num_tokens" in strategy else 2)
    for graphs in (False, True):
        torch.manual_seed(0)
        with compress(model, "kivi", graphs=graphs, residual=32) as cache:
            found.append(model.generate(ids, past_key_values=cache, max_new_tokens=40, pad_token_id=0, **strategy))
        assert not graphs or cache.graphs.replays or strategy.keys() & {"prompt_lookup_num_tokens", "num_beams"}
    assert torch.equal(*found)


def test_a_model_that_waits_for_the_device_runs_as_always(model):
    """Nothing of the step that could not be recorded is lost or done twice."""

    class Waits(torch.nn.Module):
        def forward(self, x):
            return x + 0 * float(x.sum())

    model.model.norm = torch.nn.Sequential(model.model.norm, Waits())
    with compress(model, "kivi") as cache, torch.no_grad():
        model(input_ids=prompt(), past_key_values=cache)
        plain = steps(model, cache, 10)
    with compress(model, "kivi", graphs=True) as cache, torch.no_grad():
        model(input_ids=prompt(), past_key_values=cache)
        with pytest.warns(
            UserWarning, match="decode steps are not replayed from graphs: RuntimeError: _local_scalar_dense"
        ):
            found = steps(model, cache, 10)
        assert cache.graphs.refused
        assert not cache.graphs.replays
        assert cache.sequences.lengths == [50, 50]
    alike(found, plain)


def test_the_model_is_as_before(model):
    own = model.forward
    with compress(model, "kivi", graphs=True), compress(model, "h2o", graphs=True) as other:
        assert "forward" in vars(model)
        copied = copy.deepcopy(other)
    assert "forward" in vars(model)
    copied.release()
    assert "forward" not in vars(model)
    assert model.forward == own


def test_a_forward_that_somebody_replaced_comes_back(model):
    def mine(**named):
        return type(model).forward(model, **named)

    model.forward = mine
    compress(model, "kivi", graphs=True).release()
    assert model.forward is mine


def test_refusals(monkeypatch, model):
    with pytest.raises(ValueError, match="graphs must be True or False, got 'yes'"):
        compress(model, "kivi", graphs="yes")
    with pytest.raises(ValueError, match="models whose layers are all compressed"):
        compress(random_model("qwen3-mixed"), "kivi", graphs=True)
    apart = random_model("llama")
    apart.model.layers[1].to("meta")
    with pytest.raises(ValueError, match="the model lies on several; leave it out for this one"):
        compress(apart, "kivi", graphs=True)
    monkeypatch.undo()
    with pytest.raises(ValueError, match="graphs=True replays CUDA graphs, and the model is on cpu; move it first"):
        compress(model, "kivi", graphs=True)
    assert "forward" not in vars(model)
