"""The model called token by token through a speculative cache: every way of calling it, copies, two caches, interruptions."""

import copy
from itertools import count

import pytest
import torch
from tolerances import LOGITS
from toy_models import generate, left_padded, random_model

from calib.runtime import compress
from calib.runtime.layer import CompressedLayer

EVERYTHING = {"method": "specache", "k": 1000, "residual": 32}
SOME = EVERYTHING | {"k": 8}
PROMPT, STEPS = 100, 12


@pytest.fixture(scope="module")
def model():
    return random_model("llama")


@pytest.fixture(scope="module")
def text(model):
    """Tokens `[1, PROMPT + STEPS + 9]` as the model goes on by itself, and its logits without a cache."""
    tokens = generate(model, left_padded([PROMPT]), None, max_new_tokens=STEPS + 9).sequences
    with torch.no_grad():
        return tokens, model(tokens).logits


class Widths:
    """Columns of each forward that reaches the first layer of any cache, and whether the cache speculates in it."""

    def __init__(self, monkeypatch) -> None:
        self.seen: list[tuple[int, bool]] = []
        update = CompressedLayer.update

        def updated(layer, keys, *rest, **named):
            if layer.context.layer == 0:
                self.seen.append((keys.shape[2], layer.sequences.speculating))
            return update(layer, keys, *rest, **named)

        monkeypatch.setattr(CompressedLayer, "update", updated)


def mask_of(columns: int):
    return torch.ones(1, columns, dtype=torch.long)


def position_of(column: int):
    return torch.tensor([[column]])


def embedded(model, token, cache, at):
    return model(inputs_embeds=model.get_input_embeddings()(token), past_key_values=cache).logits


def by_base_model(model, token, cache, at):
    return model.lm_head(model.model(token, past_key_values=cache).last_hidden_state)


# Ways to call the model with one token, and whether a speculative token can be added.
CALLS = {
    "positional": (lambda m, t, c, at: m(t, past_key_values=c).logits, True),
    "by name": (lambda m, t, c, at: m(input_ids=t, past_key_values=c).logits, True),
    "with a mask": (lambda m, t, c, at: m(t, attention_mask=mask_of(at + 1), past_key_values=c).logits, True),
    "with a position": (lambda m, t, c, at: m(t, position_ids=position_of(at), past_key_values=c).logits, True),
    "mask and position": (
        lambda m, t, c, at: (
            m(t, attention_mask=mask_of(at + 1), position_ids=position_of(at), past_key_values=c).logits
        ),
        True,
    ),
    "last logits": (lambda m, t, c, at: m(t, logits_to_keep=1, past_key_values=c).logits, True),
    "hidden states": (lambda m, t, c, at: m(t, output_hidden_states=True, past_key_values=c).logits, True),
    "embeddings": (embedded, False),
    "base model": (by_base_model, False),
    "chosen logits": (lambda m, t, c, at: m(t, logits_to_keep=torch.tensor([0]), past_key_values=c).logits, False),
    "a tuple": (lambda m, t, c, at: m(t, past_key_values=c, return_dict=False)[0], False),
    "labels": (lambda m, t, c, at: m(t, labels=t, past_key_values=c).logits, False),
}


@pytest.mark.full
@pytest.mark.parametrize("way", CALLS)
@torch.no_grad()
def test_a_token_at_a_time(model, text, way, monkeypatch):
    """A speculative token is added if the call allows it; if not, the step's own query chooses what is fetched. Logits have one
    column."""
    (tokens, logits), (call, speculates), widths = text, CALLS[way], Widths(monkeypatch)
    with compress(model, **EVERYTHING) as cache:
        model(tokens[:, :PROMPT], past_key_values=cache)
        for at in range(PROMPT, PROMPT + STEPS):
            found = call(model, tokens[:, at : at + 1], cache, at)
            torch.testing.assert_close(found, logits[:, at : at + 1], atol=LOGITS, rtol=0)
            assert cache.sequences.lengths == [at + 1] == [cache.get_seq_length()] and not cache.sequences.speculating
    steps = [(1, True)] + [(2, True)] * STEPS if speculates else [(1, False)] * STEPS
    assert widths.seen == [(PROMPT, False), *steps]


@torch.no_grad()
def test_ways_of_calling_may_alternate(model, text):
    """A forward that is no decode step drops the guess; the next step begins with a new one."""
    tokens, logits = text
    with compress(model, **EVERYTHING) as cache:
        model(tokens[:, :PROMPT], past_key_values=cache)
        at = PROMPT
        for size, way in zip([1, 1, 3, 1, 1, 1, 2, 1], ["positional", "base model"] * 4, strict=True):
            found = CALLS[way][0](model, tokens[:, at : at + size], cache, at)
            torch.testing.assert_close(found, logits[:, at : at + size], atol=LOGITS, rtol=0)
            if way == "positional":
                assert (cache.speculator.tokens is None) == (size > 1)
            at += size
        assert cache.sequences.lengths == [at]


@pytest.mark.full
@torch.no_grad()
def test_what_is_known_of_the_guess(model, text):
    """The guess is the model's most likely token after the step's true token and the last guess; the first guess is that of
    the low-bit copy after the true token alone, before anything is fetched."""
    tokens, at = text[0], PROMPT
    with compress(model, method="kivi", residual=32) as low:
        model(tokens[:, :PROMPT], past_key_values=low)
        speculative = model(tokens[:, at : at + 1], past_key_values=low).logits[:, -1].argmax(-1)
    with compress(model, **EVERYTHING) as cache:
        model(tokens[:, :PROMPT], past_key_values=cache)
        assert cache.speculator.tokens is None
        for at in range(PROMPT, PROMPT + STEPS):
            model(tokens[:, at : at + 1], past_key_values=cache)
            expected = model(torch.cat([tokens[:, : at + 1], speculative[:, None]], 1)).logits[:, -1].argmax(-1)
            assert torch.equal(cache.speculator.tokens, expected)
            speculative = expected


@pytest.mark.full
@torch.no_grad()
def test_a_row_with_padding_is_guessed_as_alone(model):
    """A guess follows its own row's true token, whatever the padding."""
    inputs, told = left_padded([90, 41]), []
    token, mask = inputs["input_ids"][:, -1:], inputs["attention_mask"]
    with compress(model, **EVERYTHING) as cache:
        model(**inputs, position_ids=(mask.cumsum(1) - 1).clamp(min=0), past_key_values=cache)
        for _ in range(5):
            mask = torch.nn.functional.pad(mask, (0, 1), value=1)
            model(token, attention_mask=mask, position_ids=mask.sum(1, keepdim=True) - 1, past_key_values=cache)
            told.append(cache.speculator.tokens)
    for row, length in enumerate((90, 41)):
        with compress(model, **EVERYTHING) as cache:
            model(inputs["input_ids"][row : row + 1, -length:], past_key_values=cache)
            for speculative in told:
                model(token[row : row + 1], past_key_values=cache)
                assert torch.equal(cache.speculator.tokens, speculative[row : row + 1])


@torch.no_grad()
def test_guesses_move_with_their_rows(model):
    inputs, to_device = left_padded([120, 60, 90]), torch.tensor([2, 0, 0, 1])
    with compress(model, **EVERYTHING) as cache:
        model(**inputs, past_key_values=cache)
        model(inputs["input_ids"][:, -1:], past_key_values=cache)
        predicted, tokens = cache.speculator.tokens, inputs["input_ids"][to_device, -1:]
        assert len(set(predicted.tolist())) == 3
        branch = copy.deepcopy(cache)
        cache.batch_select_indices(to_device)
        assert torch.equal(cache.speculator.tokens, predicted[to_device])
        found = model(tokens, past_key_values=cache).logits
        expected = model(inputs["input_ids"][:, -1:], past_key_values=branch).logits
        torch.testing.assert_close(found, expected[to_device], atol=LOGITS, rtol=0)
        assert torch.equal(cache.speculator.tokens, branch.speculator.tokens[to_device])
    branch.release()


@pytest.mark.full
def test_a_copy_in_the_middle_goes_on_alike(model):
    inputs = left_padded([120, 60])
    with compress(model, **SOME) as cache:
        first = generate(model, inputs, cache, max_new_tokens=7).sequences
        branch = copy.deepcopy(cache)
        assert branch.speculator is not cache.speculator and torch.equal(
            branch.speculator.tokens, cache.speculator.tokens
        )
        assert branch.speculator.sequences is branch.sequences
        turn = {"input_ids": first, "attention_mask": torch.cat([inputs["attention_mask"], torch.ones(2, 7).long()], 1)}
        answers = [generate(model, turn, one).sequences for one in (branch, cache)]
        assert torch.equal(*answers)
        positions = [[layer.store.pool.positions for layer in one.compressed] for one in (branch, cache)]
        assert all(torch.equal(*pair) for pair in zip(*positions, strict=True))
    branch.release()


@pytest.mark.full
def test_two_caches_of_one_model(model):
    """Caches are used by turns: each keeps its own guess, and gives the tokens that it gives alone."""
    inputs, options = left_padded([120, 60]), [SOME, SOME | {"bits": 4}, {"method": "kivi", "residual": 32}]
    alone = []
    for wanted in options:
        with compress(model, **wanted) as cache:
            alone.append(generate(model, inputs, cache, max_new_tokens=20).sequences)
    caches = [compress(model, **wanted) for wanted in options]
    with torch.no_grad():
        mask = inputs["attention_mask"]
        tokens = [inputs["input_ids"]] * 3
        for step in range(20):
            positions = (mask.cumsum(1) - 1).clamp(min=0)
            for number, cache in enumerate(caches):
                new = slice(None) if not step else slice(-1, None)
                told = {"attention_mask": mask, "position_ids": positions[:, new], "past_key_values": cache}
                best = model(tokens[number][:, new], **told).logits[:, -1:].argmax(-1)
                tokens[number] = torch.cat([tokens[number], best], 1)
            mask = torch.nn.functional.pad(mask, (0, 1), value=1)
    assert all(torch.equal(*pair) for pair in zip(tokens, alone, strict=True))
    for number, cache in enumerate(caches):
        cache.release()
        hooks = len(model._forward_hooks), len(model._forward_pre_hooks)
        # Each speculating cache has one hook and one pre-hook; another pre-hook is shared by all caches.
        assert hooks == [(1, 2), (0, 1), (0, 0)][number]


def test_release_in_the_middle(model):
    """A streamer releases the cache: the next step fails instead of giving wrong tokens."""
    steps = count()

    class Released:
        def put(self, value):
            if next(steps) == 4:
                cache.release()

        def end(self):
            pass

    before = model.config._attn_implementation
    cache = compress(model, **SOME)
    with pytest.raises(ValueError, match="this cache was released"):
        generate(model, left_padded([100]), cache, streamer=Released())
    assert model.config._attn_implementation == before and not cache.sequences.speculating
    assert not model._forward_hooks and not model._forward_pre_hooks
    assert cache.memory().measured_bytes > 0


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["lm_head", "model.layers.1.mlp", "model.layers.0.self_attn", "model.embed_tokens"])
@pytest.mark.parametrize("forward", ["pre-decoding", "step"])
@torch.no_grad()
def test_an_interrupted_step(model, text, error, where, forward):
    """No token is taken for a guess afterwards: neither after `reset`, nor if every layer has stored the step."""
    tokens, logits = text
    with compress(model, **EVERYTHING) as cache:
        model(tokens[:, :PROMPT], past_key_values=cache)
        at = PROMPT
        if forward == "step":
            model(tokens[:, at : at + 1], past_key_values=cache)
            at += 1

        def stop(*_):
            hook.remove()
            raise error

        hook = model.get_submodule(where).register_forward_hook(stop)
        with pytest.raises(error):
            model(tokens[:, at : at + 1], past_key_values=cache)
        if where != "model.layers.0.self_attn":  # else layers hold different tokens, which is refused
            at = cache.sequences.lengths[0]
            found = model(tokens[:, at : at + 8], past_key_values=cache).logits
            torch.testing.assert_close(found, logits[:, at : at + 8], atol=LOGITS, rtol=0)
            assert cache.sequences.lengths == [at + 8] == [cache.get_seq_length()]
        else:
            with pytest.raises(RuntimeError, match=r"interrupted.*cache\.reset"):
                model(tokens[:, at : at + 8], past_key_values=cache)
        cache.reset()
        found = model(tokens[:, :PROMPT], past_key_values=cache).logits
        torch.testing.assert_close(found, logits[:, :PROMPT], atol=LOGITS, rtol=0)
        found = model(tokens[:, PROMPT : PROMPT + 1], past_key_values=cache).logits
        torch.testing.assert_close(found, logits[:, PROMPT : PROMPT + 1], atol=LOGITS, rtol=0)
        assert not cache.sequences.speculating


@pytest.mark.full
@pytest.mark.parametrize("family", ["llama", "qwen3-mixed"])
@torch.no_grad()
def test_arguments_without_names(family):
    """Mask and positions as positional arguments, in a padded batch; also in a model with sliding layers."""
    model, inputs, told = random_model(family), left_padded([100, 70]), []
    for named in (True, False):
        mask, predicted = inputs["attention_mask"], []
        with compress(model, **EVERYTHING) as cache:
            model(**inputs, position_ids=(mask.cumsum(1) - 1).clamp(min=0), past_key_values=cache)
            for _ in range(6):
                mask = torch.nn.functional.pad(mask, (0, 1), value=1)
                token, positions = inputs["input_ids"][:, -1:], mask.sum(1, keepdim=True) - 1
                if named:
                    found = model(token, attention_mask=mask, position_ids=positions, past_key_values=cache).logits
                else:
                    found = model(token, mask, positions, past_key_values=cache).logits
                predicted.append(cache.speculator.tokens)
            told.append((found, predicted))
    torch.testing.assert_close(told[0][0], told[1][0], atol=LOGITS, rtol=0)
    assert torch.equal(torch.stack(told[0][1]), torch.stack(told[1][1]))
