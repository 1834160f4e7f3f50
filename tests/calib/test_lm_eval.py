"""CompressedLM: with the full cache lm-eval's own answers, with others those of a hand-fed cache; every forward uses the cache."""

from itertools import pairwise
from string import punctuation

import pytest
import torch
from toy_language_model import toy_model, toy_tokenizer

pytest.importorskip("lm_eval", reason="lm-eval is not installed")

from toy_lm_eval import WORDS, plain_lm, requests

from calib.errors import UsageError
from calib.evaluate.lm_eval.compressed_lm import CompressedLM
from calib.runtime import compress
from calib.runtime.cache import CompressedCache
from calib.runtime.cache_argument import cache_in

LONG = " ".join(WORDS * 5)  # 339 tokens, where the model was made for 256
PAIRS = [
    ("a b", "c"),
    ("", "hello there"),
    ("<s>kalo", " mine"),
    (LONG, " kalo mine"),  # the beginning is cut off
    ("kalo mine ", "tas"),  # the space goes to the continuation
    (LONG[:100], " " + LONG[:70]),
    ("mine", "y" * 256),  # nothing of the context but the last token
]
TEXTS = ["kalo mine", LONG, "", "z" * 256, "z" * 257]
KIVI = {"bits": 2, "group": 8, "residual": 8}


@pytest.fixture(scope="module")
def model():
    return toy_model()


@pytest.fixture(scope="module")
def tokenizer():
    return toy_tokenizer()


@pytest.fixture(scope="module")
def plain(model, tokenizer):
    return plain_lm(model, tokenizer)


def scores(lm, pairs):
    """Log-likelihoods and greedy flags."""
    return tuple(zip(*lm.loglikelihood(requests("loglikelihood", *pairs), disable_tqdm=True), strict=True))


def rolling(lm, texts):
    return lm.loglikelihood_rolling(requests("loglikelihood_rolling", *((text,) for text in texts)), disable_tqdm=True)


def generated(lm, prompts, **settings):
    asked = ((prompt, {"max_gen_toks": 12, **settings}) for prompt in prompts)
    return lm.generate_until(requests("generate_until", *asked), disable_tqdm=True)


def one_forward(model, tokens, count):
    """Log-likelihood of the last `count` tokens and whether they are greedy, without any cache."""
    logits = model(torch.tensor([tokens[:-1]]), use_cache=False).logits[0, -count:].double().log_softmax(-1)
    wanted = torch.tensor(tokens[-count:])
    return float(logits.gather(1, wanted[:, None]).sum()), bool((logits.argmax(-1) == wanted).all())


def hand_fed(model, context, continuation, chunk, **options):
    """Log-likelihood with a hand-fed cache: the context without its last token, then pieces of `chunk` tokens."""
    tokens, found = context + continuation, []
    cuts = [0, len(context) - 1, *range(len(context) - 1 + chunk, len(tokens) - 1, chunk), len(tokens) - 1]
    with compress(model, "kivi", **options) as cache:
        for start, end in pairwise(cuts):
            found.append(model(torch.tensor([tokens[start:end]]), past_key_values=cache).logits[0])
    logits = torch.cat(found[1:]).double().log_softmax(-1)
    return float(logits.gather(1, torch.tensor(continuation)[:, None]).sum())


def test_the_full_cache_gives_lm_evals_own_log_likelihoods(model, tokenizer, plain):
    lm = CompressedLM(model, tokenizer, "full", batch_size=3, chunk=48)
    assert lm.max_length == plain.max_length == 256
    (nats, greedy), (wanted, flags) = scores(lm, PAIRS), scores(plain, PAIRS)
    assert nats == pytest.approx(wanted, rel=0, abs=1e-4 + 1e-6 * 1400) and greedy == flags
    assert nats[:6] == pytest.approx(wanted[:6], rel=0, abs=1e-4)
    assert rolling(lm, TEXTS) == pytest.approx(rolling(plain, TEXTS), rel=1e-6, abs=1e-4)


def test_the_full_cache_gives_those_of_one_forward_without_a_cache(model, tokenizer):
    lm = CompressedLM(model, tokenizer, "full", batch_size=4, chunk=48)
    contexts = [tokenizer.encode(text) for text in ("", "mine ", LONG[:60], LONG[:33])]
    pairs = []
    for number, context in enumerate(contexts):  # every other continuation is what the model would say
        tokens = context or [1]
        for position in range(3 + number):
            logits = model(torch.tensor([tokens])).logits[0, -1]
            tokens = [*tokens, int(logits.argmax() if number % 2 or position < 2 else logits.argmin())]
        pairs.append((("", ""), context or [1], tokens[-3 - number :]))
    found = lm._loglikelihood_tokens(pairs, disable_tqdm=True)
    wanted = [one_forward(model, context + continuation, len(continuation)) for _, context, continuation in pairs]
    assert [greedy for _, greedy in found] == [greedy for _, greedy in wanted] == [False, True, False, True]
    assert [nats for nats, _ in found] == pytest.approx([nats for nats, _ in wanted], rel=0, abs=1e-4)


def test_the_full_cache_generates_what_lm_evals_own_model_does(model, tokenizer, plain):
    lm = CompressedLM(model, tokenizer, "full", batch_size=2)
    prompts = ["kalo mine", LONG, "ka", "ne"]
    free = generated(lm, prompts)
    assert free == generated(plain, prompts) and all(free)
    stops = [free[0][3], free[1][2:4]]  # one of a single token, one of two, each in the middle of an answer
    cut = generated(lm, prompts, until=stops)
    assert cut == generated(plain, prompts, until=stops) != free
    assert cut[0] == free[0][: free[0].index(stops[0])] and not any(stop in text for stop in stops for text in cut)
    assert generated(lm, prompts[:1], max_gen_toks=3) == [free[0][:3]]


def test_a_two_bit_cache_is_what_the_log_likelihoods_come_from(model, tokenizer):
    """Also of a single token: the forward that predicts it reads the context from the pages."""
    lm = CompressedLM(model, tokenizer, "kivi", batch_size=4, chunk=5, **KIVI)
    pairs = [(LONG[:70], " kalo mine tasope"), (LONG[:41], " "), (LONG[:41], " kalo"), (LONG[:90], " mine ru")]
    nats, _ = scores(lm, pairs)
    full, _ = scores(CompressedLM(model, tokenizer, "full", batch_size=4, chunk=5), pairs)
    assert all(abs(ours - exact) > 1e-2 for ours, exact in zip(nats, full, strict=True))
    ids = [lm._encode_pair(*pair) for pair in pairs]
    assert nats == pytest.approx([hand_fed(model, *pair, chunk=5, **KIVI) for pair in ids], rel=0, abs=1e-4)
    caches = {"full": {}, "kivi": KIVI}
    sums = [rolling(CompressedLM(model, tokenizer, name, chunk=9, **caches[name]), [LONG[:80]])[0] for name in caches]
    assert abs(sums[0] - sums[1]) > 1e-1
    assert generated(lm, [LONG[:200]]) != generated(CompressedLM(model, tokenizer, "full"), [LONG[:200]])


def test_special_probes_are_those_of_the_tokenizer(model, tokenizer, probed_ids):
    lm = CompressedLM(model, tokenizer, "zipcache", probes="special", recompress=20)
    assert rolling(lm, [LONG[:80]]) and not probed_ids  # its prompt is one token
    assert scores(lm, [(LONG[:80], " kalo")])
    assert probed_ids == {(0, 1, 2, *sorted(tokenizer.convert_tokens_to_ids(list(punctuation))))}


def test_no_forward_goes_without_the_compressed_cache(model, tokenizer):
    lm, seen = CompressedLM(model, tokenizer, "kivi", batch_size=2, chunk=32, **KIVI), []
    hook = model.register_forward_pre_hook(lambda module, args, kwargs: seen.append(cache_in(kwargs)), with_kwargs=True)
    try:
        scores(lm, PAIRS[:3])
        rolling(lm, TEXTS[:1])
        generated(lm, ["ka"])
    finally:
        hook.remove()
    assert len(seen) > 12 and all(isinstance(cache, CompressedCache) for cache in seen)
    assert len({id(cache) for cache in seen}) == len(lm.memories) == 4  # a batch each, and of scored rows two kinds
    assert all(memory.measured_bytes > 0 for memory in lm.memories)


@pytest.mark.parametrize(("method", "options"), [("full", {}), ("kivi", KIVI)])
def test_batches_and_padding_change_no_answer(model, tokenizer, method, options):
    pairs, texts = (
        [(LONG[:size], f" {word}") for size, word in zip(range(5, 95, 15), WORDS, strict=False)],
        [LONG[:40], "ka"],
    )
    single, many = (CompressedLM(model, tokenizer, method, batch_size=size, chunk=4, **options) for size in (1, 8))
    assert scores(many, pairs)[0] == pytest.approx(scores(single, pairs)[0], rel=0, abs=1e-4 if options else 1e-5)
    assert rolling(many, texts) == pytest.approx(rolling(single, texts), rel=1e-7, abs=1e-5)
    prompts = ["ka", LONG[:50], "mine"]
    assert generated(many, prompts) == generated(single, prompts)


def test_a_row_that_ends_keeps_nothing_of_what_follows_in_its_batch(model, monkeypatch):
    """Also if the ended row is padded with an ordinary token, because the tokenizer has no special one."""
    monkeypatch.setattr("calib.evaluate.lm_eval.answers.pad_token", lambda tokenizer: 80)
    bare = toy_tokenizer()
    bare.eos_token = bare.pad_token = None
    lm, steps = CompressedLM(model, bare, "full"), []
    wanted = [*generated(lm, ["ka"]), *generated(lm, ["mine ru"], max_gen_toks=3)]

    def end_the_longer_prompts_row(module, given, logits):
        steps.append(logits)
        if len(steps) == 4:
            logits[0, -1, model.generation_config.eos_token_id] = 1e4

    hook = model.lm_head.register_forward_hook(end_the_longer_prompts_row)
    try:
        assert generated(lm, ["ka", "mine ru"]) == wanted and len(steps) == 12
    finally:
        hook.remove()


def test_sampling_follows_the_settings(model, tokenizer):
    lm = CompressedLM(model, tokenizer, "full")
    torch.manual_seed(3)
    drawn = generated(lm, ["ka"] * 3, do_sample=True, temperature=1.5)
    torch.manual_seed(3)
    assert drawn == generated(lm, ["ka"] * 3, temperature=1.5) and len(set(drawn)) == 3
    greedy = generated(lm, ["ka"])
    assert generated(lm, ["ka"], do_sample=False, temperature=1.5) == greedy == generated(lm, ["ka"], temperature=0.0)


def test_the_adapter_refuses_what_it_cannot_do(model, tokenizer):
    with pytest.raises(ValueError, match="kiwi"):
        CompressedLM(model, tokenizer, "kiwi")
    with pytest.raises(ValueError, match="bits"):
        CompressedLM(model, tokenizer, "kivi", bits=0)
    for option, value in (("batch_size", 0), ("chunk", 1.5), ("max_length", 0), ("max_gen_toks", True)):
        with pytest.raises(UsageError, match=rf"invalid value {value} for '{option}' \(a whole number, at least 1\)"):
            CompressedLM(model, tokenizer, "full", **{option: value})
    lm = CompressedLM(model, tokenizer, "full")
    with pytest.raises(UsageError, match="a continuation takes 257 tokens and this model was made for 256"):
        scores(lm, [("a", "x" * 257)])
    with pytest.raises(UsageError, match="a continuation without tokens"):
        scores(lm, [("a", "")])
    with pytest.raises(UsageError, match="max_gen_toks=256 leaves no room for a prompt in the 256 tokens"):
        generated(lm, ["ka"], max_gen_toks=256)
    bare = toy_tokenizer()
    bare.bos_token = bare.eos_token = None
    with pytest.raises(UsageError, match="this tokenizer has no first token to stand for an empty context"):
        rolling(CompressedLM(model, bare, "full"), ["ka"])
