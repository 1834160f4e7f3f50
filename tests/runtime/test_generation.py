"""Generation through a cache: the full method's tokens, and every other's attention against "decode the pages, then attend"."""

import oracle
import pytest
import torch
from cases import BY_NAME, CASES
from in_turn import in_turn
from offloaded_tokens import moments
from tolerances import ATTENTION, LOGITS, LOGITS_ONE_CODE
from toy_models import FAMILIES, NEW, generate, left_padded, random_model
from transformers import DynamicCache

from calib.runtime import compress
from calib.runtime.layer import CompressedLayer
from calib.runtime.tiered.plan import TieredPlan

# Less than a block (of 32, 48 or 128 tokens), several blocks, and whole ones of 32 and 128; two rows are padded, one is not.
RAGGED = [31, 200, 128]


def agree(found, expected, tolerance, least=NEW // 2):
    """Logits are close as long as the tokens are the same, and tokens differ first where their two logits are that close.

    At least `least` tokens of all rows are the same, so that something was compared.
    """
    steps = torch.stack(found.logits), torch.stack(expected.logits)
    same = 0
    for row in range(found.sequences.shape[0]):
        for step in range(steps[0].shape[0]):
            mine, theirs = steps[0][step, row], steps[1][step, row]
            assert (mine - theirs).abs().max() <= tolerance, (row, step)
            column = step - steps[0].shape[0]
            chosen, other = found.sequences[row, column], expected.sequences[row, column]
            if chosen != other:
                assert (mine[chosen] - mine[other]).abs() <= 2 * tolerance, (row, step)
                break
            same += 1
    assert same >= least, f"only {same} equal tokens"


@pytest.fixture(params=list(FAMILIES))
def model(request):
    return random_model(request.param)


@pytest.mark.parametrize("lengths", [[37], RAGGED, [1, 1], [1, 130], [127, 129]], ids=str)
def test_full_gives_the_tokens_of_the_dynamic_cache(model, lengths):
    inputs = left_padded(lengths)
    expected = generate(model, inputs, DynamicCache(config=model.config))
    with compress(model, method="full") as cache:
        found = generate(model, inputs, cache)
    assert torch.equal(found.sequences, expected.sequences)
    torch.testing.assert_close(torch.stack(found.logits), torch.stack(expected.logits), atol=LOGITS, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("lengths", [[150], [20, 140]], ids=str)
def test_full_in_16_bits_follows_the_dynamic_cache(dtype, lengths):
    model, inputs = random_model("llama", dtype), left_padded(lengths)
    expected = generate(model, inputs, DynamicCache(config=model.config))
    with compress(model, method="full") as cache:
        found = generate(model, inputs, cache)
    size = torch.stack(expected.logits).abs().max().item()
    agree(found, expected, 16 * ATTENTION[dtype] * size, least=4)  # 16 roundings of the hidden state in two layers


def test_full_samples_the_tokens_of_the_dynamic_cache(model):
    inputs, options = left_padded(RAGGED), {"do_sample": True, "temperature": 0.9, "top_k": 20}
    torch.manual_seed(11)
    expected = generate(model, inputs, DynamicCache(config=model.config), **options)
    torch.manual_seed(11)
    with compress(model, method="full") as cache:
        found = generate(model, inputs, cache, **options)
    assert torch.equal(found.sequences, expected.sequences)
    assert len(set(found.sequences[0, -NEW:].tolist())) > 4  # it really sampled


@pytest.mark.parametrize("family", ["llama", "mistral", "mistral-sliding", "qwen3-mixed"])
def test_full_beams_are_those_of_the_dynamic_cache(family):
    model, inputs = random_model(family), left_padded([120, 140])
    options = {"num_beams": 3, "num_return_sequences": 2}
    expected = generate(model, inputs, DynamicCache(config=model.config), **options)
    with compress(model, method="full") as cache:
        found = generate(model, inputs, cache, **options)
        pages = [set(row) for row in cache.sequences.table.rows]
    assert torch.equal(found.sequences, expected.sequences)
    assert pages[0] & pages[1] & pages[2], "beams of one prompt share its full page"
    assert not pages[0] & pages[3]


class Observed:
    """Compares every attention output with the oracle's, over what the pages and windows held before the forward."""

    def __init__(self, model, cache, monkeypatch, answer_with_oracle: bool = False):
        self.cache, self.answer_with_oracle = cache, answer_with_oracle
        self.compared, self.worst = 0, 0.0
        self.before = {}
        original = CompressedLayer.attend

        def watched(layer, query, mask, logits):
            if layer is self.cache.compressed[0]:
                self.before = dict(enumerate(moments(cache)))
            new_keys, new_values = layer._arrived
            output = original(layer, query, mask, logits)
            expected = self.expected(layer, query, new_keys, new_values, logits).detach()
            difference = (output.detach().double() - expected).abs().max() / expected.abs().max()
            self.worst = max(self.worst, float(difference))
            self.compared += 1
            return expected.to(query.dtype) if self.answer_with_oracle else output

        monkeypatch.setattr(CompressedLayer, "attend", watched)

    def expected(self, layer, query, new_keys, new_values, logits):
        """The oracle's attention output; zeros at padded queries. A speculative token is one more column of every row."""
        held = self.before.get(self.cache.compressed.index(layer))
        forward = layer.sequences.forward
        output = torch.zeros(query.shape, dtype=torch.float64)
        relocates = isinstance(layer.plan, TieredPlan) and layer.plan.relocates
        for row, (before, count) in enumerate(zip(forward.before, forward.counts, strict=True)):
            count += forward.speculative
            if not count:
                continue
            real = slice(query.shape[2] - count, None)
            keys, values = (new[row, :, real].double() for new in (new_keys, new_values))
            positions = torch.arange(before, before + count).expand(keys.shape[:2])
            if before:
                met = held[row].met(count, forward.speculative)
                keys, values = (torch.cat(pair, 1) for pair in zip(met[:2], (keys, values), strict=True))
                old = met.positions
                if relocates and old is not None:  # sinks are before the window, also where a sliding window counts
                    sinks, window = layer.sequences.held(row, before)
                    old = old + (before - sinks - window) * (torch.arange(old.shape[1]) < sinks)
                positions = None if old is None else torch.cat([old, positions], 1)
            asked = query[row, :, real]
            output[row, :, real] = oracle.attention(
                asked,
                keys,
                values,
                logits.scale,
                logits.softcap,
                logits.sliding,
                positions,
                layer.plan.oracle_share if before and isinstance(layer.plan, TieredPlan) else None,
                self.sinks(layer, row, before, asked) if before and relocates else None,
            )
        return output

    @staticmethod
    def sinks(layer, row, before, query):
        """The number of sinks, and the queries rotated to their positions inside the cache (StreamingLLM)."""
        sinks, window = layer.sequences.held(row, before)
        return sinks, oracle.rotated(query, layer.context.rotation.frequencies, sinks + window - before)


# InfLLM's fetched tokens are attended at other positions than their own: that is in test_placement.py.
WATCHED = [case for case in CASES if not (case.on_host and case.relocates)]


@pytest.mark.parametrize(("case", "family"), in_turn(WATCHED, ["llama", "mistral-sliding"]))
def test_attention_is_that_of_the_decoded_pages(case, family, monkeypatch):
    model = random_model(family)
    with case.open(model) as cache:
        watch = Observed(model, cache, monkeypatch)
        generate(model, left_padded([31, 190, 120]), cache, max_new_tokens=12)
    assert watch.compared == (12 + case.speculator) * len(cache.compressed)
    assert watch.worst < ATTENTION[torch.float32]


@pytest.mark.slow
@pytest.mark.parametrize("case", WATCHED, ids=str)
@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in ("llama", "mistral-sliding")])
@pytest.mark.parametrize("lengths", [RAGGED, [1, 300], [64]], ids=str)
def test_attention_is_that_of_the_decoded_pages_everywhere(family, case, lengths, monkeypatch):
    model = random_model(family)
    with case.open(model) as cache:
        watch = Observed(model, cache, monkeypatch)
        generate(model, left_padded(lengths), cache, max_new_tokens=40)
    assert watch.compared == (40 + case.speculator) * len(cache.compressed)
    assert watch.worst < ATTENTION[torch.float32]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["kivi-2-short", "kivi-2-calibrated", "rtn-4", "zipcache-16-4-2", "mikv-8-2"])
def test_attention_in_16_bits_is_that_of_the_decoded_pages(name, dtype, monkeypatch):
    model = random_model("qwen3", dtype)
    with BY_NAME[name].open(model) as cache:
        watch = Observed(model, cache, monkeypatch)
        generate(model, left_padded([70, 33]), cache, max_new_tokens=8)
    assert watch.compared == 16
    assert watch.worst < ATTENTION[dtype]


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3"])
@pytest.mark.parametrize(
    "name", ["kivi-2-short", "kivi-4-calibrated", "rtn-4", "rtn-4-calibrated", "zipcache-short", "mikv-16-2"]
)
def test_tokens_are_those_of_decoding_the_pages_and_attending(name, family, monkeypatch):
    model, inputs, runs = random_model(family), left_padded([40, 150]), []
    for answer_with_oracle in (False, True):
        with monkeypatch.context() as patch, BY_NAME[name].open(model) as cache:
            if answer_with_oracle:
                watch = Observed(model, cache, patch, answer_with_oracle=True)
            runs.append(generate(model, inputs, cache, max_new_tokens=12))
    assert watch.compared == 12 * len(cache.compressed)
    agree(*runs, LOGITS_ONE_CODE)


def test_sampled_tokens_attend_the_decoded_pages(monkeypatch):
    model = random_model("llama")
    torch.manual_seed(5)
    with BY_NAME["kivi-2-short"].open(model) as cache:
        watch = Observed(model, cache, monkeypatch)
        drawn = generate(model, left_padded([40, 150]), cache, do_sample=True, temperature=1.5).sequences
    assert watch.worst < ATTENTION[torch.float32] and watch.compared == NEW * 2
    assert not torch.equal(drawn[:, -NEW:], drawn[:, -NEW - 1 : -1])


@pytest.mark.parametrize(
    "name", ["kivi-2-short", "kivi-2-calibrated", "rtn-2", "zipcache-short", "mikv-8-2", "h2o", "streaming_llm"]
)
def test_beams_attend_the_decoded_pages(name, monkeypatch):
    model = random_model("llama")
    with BY_NAME[name].open(model) as cache:
        watch = Observed(model, cache, monkeypatch)
        generate(model, left_padded([120, 60]), cache, num_beams=3, max_new_tokens=16)
    assert watch.compared == 16 * 2
    assert watch.worst < ATTENTION[torch.float32]


@pytest.mark.parametrize("case", WATCHED, ids=str)
def test_chunked_prefill_and_several_turns_on_one_cache(case, monkeypatch):
    model, text = random_model("llama"), left_padded([260])["input_ids"]
    with case.open(model) as cache:
        watch = Observed(model, cache, monkeypatch)
        for stop in (1, 40, 200):
            model(text[:, cache.get_seq_length() : stop], past_key_values=cache)
        first = generate(model, {"input_ids": text[:, :230]}, cache, max_new_tokens=3).sequences
        turn = torch.cat([first, text[:, 230:]], 1)
        second = generate(model, {"input_ids": turn}, cache, max_new_tokens=3).sequences
    assert second.shape[1] == turn.shape[1] + 3
    assert cache.get_seq_length() == second.shape[1] - 1 == cache.sequences.lengths[0]
    assert watch.compared == 2 * (3 + 3 + 3 + 2 * case.speculator)
    assert watch.worst < ATTENTION[torch.float32]


def test_several_turns_with_full_are_those_of_the_dynamic_cache():
    model, inputs = random_model("mistral-sliding"), left_padded([90, 60])
    caches, answers = (DynamicCache(config=model.config), compress(model, method="full")), []
    for cache in caches:
        sequence, mask = inputs["input_ids"], inputs["attention_mask"]
        for _ in range(3):
            found = generate(model, {"input_ids": sequence, "attention_mask": mask}, cache, max_new_tokens=7).sequences
            sequence = torch.cat([found, found[:, :5]], 1)
            mask = torch.cat([mask, mask.new_ones(2, sequence.shape[1] - mask.shape[1])], 1)
        answers.append(sequence)
    caches[1].release()
    assert torch.equal(*answers)


def test_two_caches_of_one_model_do_not_disturb_each_other():
    model, inputs = random_model("llama"), left_padded([140, 70])
    alone = {}
    for name in ("kivi-2-short", "rtn-4"):
        with BY_NAME[name].open(model) as cache:
            alone[name] = generate(model, inputs, cache).sequences
    caches = {name: BY_NAME[name].open(model) for name in alone}
    steps = {name: {"input_ids": inputs["input_ids"], "attention_mask": inputs["attention_mask"]} for name in caches}
    for _ in range(NEW // 4):  # by turns
        for name, cache in caches.items():
            found = generate(model, steps[name], cache, max_new_tokens=4).sequences
            mask = torch.cat([steps[name]["attention_mask"], torch.ones(2, 4, dtype=torch.long)], 1)
            steps[name] = {"input_ids": found, "attention_mask": mask}
    for name, cache in caches.items():
        assert torch.equal(steps[name]["input_ids"], alone[name])
        cache.release()
    assert not torch.equal(alone["kivi-2-short"], alone["rtn-4"])
