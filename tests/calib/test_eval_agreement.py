"""The task `agreement` against the same comparison spelled out, and how long the full cache's answers are kept."""

from contextlib import contextmanager

import pytest
import torch
from one_line import message
from torch.nn import functional
from toy_evaluation import figures, subject
from toy_language_model import save_text, toy_model

from calib.errors import RunError, UsageError
from calib.evaluate.feed import Feed
from calib.evaluate.tasks import agreement, build_task
from calib.evaluate.tasks.agreement import Distance
from calib.runtime import compress

SMALL = {"prefill": 16, "chunk": 7, "length": 48, "tokens": 96}


@pytest.fixture(scope="module")
def model():
    return toy_model()


def column(model, batch_size=2, limit=None, **options):
    return build_task("agreement", {**SMALL, **options}).columns(subject(model, batch_size, limit))[0]


def spelled_out(model, tokens, chunk, method, **options):
    """Return logits [rows, tokens, vocabulary] and each layer's attention outputs of the tokens after a prefill of 16."""
    outputs = [[] for _ in model.model.layers]
    with compress(model, method, **options) as cache:
        feed = Feed(model, cache)
        feed(tokens[:, :16])
        hooks = [
            layer.self_attn.register_forward_hook(lambda module, given, output, kept=kept: kept.append(output[0]))
            for layer, kept in zip(model.model.layers, outputs, strict=True)
        ]
        logits = torch.cat([feed(part) for part in tokens[:, 16:].split(chunk, 1)], 1)
        for hook in hooks:
            hook.remove()
    return logits, [torch.cat(kept, 1) for kept in outputs]


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_the_full_cache_agrees_with_itself(kind):
    model = toy_model(kind)
    found = figures(column(model), model, "full")
    assert (found["agreement"], found["low"], found["high"]) == (1, 1, 1)
    assert found["kl"] == pytest.approx(0, abs=1e-6) and found["error"] == 0
    assert [found[f"error at layer {layer}"] for layer in range(3)] == [0, 0, 0]
    assert found["sequences"] == 3 and found["tokens"] == 96


@pytest.mark.full
def test_it_agrees_in_16_bits_too():
    model = toy_model().to(torch.bfloat16)
    found = figures(column(model), model, "full")
    assert (found["agreement"], found["error"]) == (1, 0) and found["kl"] == pytest.approx(0, abs=1e-6)
    assert figures(column(model), model, "rtn", bits=2)["error"] > 0.01


@pytest.mark.parametrize("chunk", [1, 7, 40])
def test_the_three_measures_of_two_bits(model, chunk):
    two = column(model, batch_size=3, chunk=chunk)
    found = figures(two, model, "rtn", bits=2)
    (made,) = two.batches()
    full, a = spelled_out(model, made.tokens, chunk, "full")
    said, b = spelled_out(model, made.tokens, chunk, "rtn", bits=2)
    assert found["agreement"] == pytest.approx(float((full.argmax(-1) == said.argmax(-1)).float().mean()))
    both = (logits.double().log_softmax(-1).flatten(0, 1) for logits in (said, full))
    assert found["kl"] == pytest.approx(float(functional.kl_div(*both, reduction="batchmean", log_target=True)))
    errors = [float((y - x).double().norm() / x.double().norm()) for x, y in zip(a, b, strict=True)]
    assert [found[f"error at layer {layer}"] for layer in range(3)] == pytest.approx(errors, rel=1e-5)
    assert found["error"] == pytest.approx(sum(errors) / 3, rel=1e-5)
    assert found["agreement"] < 1 and found["kl"] > 1e-4 and min(errors) > 1e-3
    assert found["low"] <= found["agreement"] <= found["high"] and found["kl_low"] < found["kl"] < found["kl_high"]


@pytest.mark.full
def test_a_guess_that_is_taken_along_is_not_compared(model):
    """SpeCache's decode step adds a speculative token, which is not compared. With all tokens fetched its first layer is exact."""
    found = figures(column(model, chunk=1), model, "specache", k=64, bits=2)
    assert found["error at layer 0"] < 1e-5 and found["tokens"] == 96
    assert figures(column(model, chunk=1), model, "offload")["error"] < 1e-5


@contextmanager
def counted(monkeypatch, kept):
    """Yield the list of full caches that the task makes while it may keep at most `kept` bytes of answers."""
    made = []
    with monkeypatch.context() as patched:
        patched.setattr(agreement, "KEPT_BYTES", kept)
        if not kept:
            patched.setattr(agreement.Answer, "to", None)  # no answer may be moved, not even for one batch
        patched.setattr(agreement, "compress", lambda *given: made.append(given[1:]) or compress(*given))
        yield made


@pytest.mark.full
def test_the_full_cache_runs_once_for_all_methods_and_is_bounded(model, monkeypatch):
    one = 2 * 32 * (259 + 3 * 48) * 4  # bytes of a batch of two rows
    several = []
    for kept, runs in ((2**30, 2), (one, 3), (one - 1, 3), (0, 4)):
        with counted(monkeypatch, kept) as made:
            both = column(model)
            several.append([figures(both, model, "rtn", bits=2), figures(both, model, "kivi", bits=4, residual=32)])
            assert made == [("full",)] * runs, kept
            held = sum(part.logits.nbytes + part.outputs.nbytes for parts in both._kept.values() for part in parts)
            assert held <= kept and (held > 0) == (kept > 0)
    assert several[0] == several[1] == several[2] == several[3]
    assert several[0][0]["kl"] > several[0][1]["kl"]


def test_a_model_is_left_as_it_was_also_by_a_failure(model, monkeypatch):
    def failing(feed, tokens, *given, **named):
        if feed.cache.method == "rtn" and tokens.shape[1] == 7:
            raise MemoryError("no room")
        return called(feed, tokens, *given, **named)

    before, called, both = model.config._attn_implementation, Feed.__call__, column(model)
    with monkeypatch.context() as patched:
        patched.setattr(Feed, "__call__", failing)
        with pytest.raises(MemoryError) as failed:
            figures(both, model, "rtn", bits=2)
    assert failed.tb is not None  # the error's frames are still held
    assert model.config._attn_implementation == before
    assert not any(module._forward_hooks for module in model.modules())
    assert not both._kept  # answers of a part of a batch are not kept
    assert figures(both, model, "rtn", bits=2) == figures(column(model), model, "rtn", bits=2)


def test_sums_become_figures(model):
    small = column(model, tokens=64)
    rows = (torch.tensor([32.0, 16.0]), torch.tensor([0.0, 6.4]))
    squares = (torch.tensor([[1.0, 0, 4], [3, 0, 5]]), torch.tensor([[8.0, 1, 40], [8, 1, 60]]))
    found = small.summary([Distance(*(part.double() for part in (*rows, *squares)))])
    assert found["agreement"] == 0.75 and found["kl"] == pytest.approx(0.1)
    assert [found[f"error at layer {layer}"] for layer in range(3)] == pytest.approx([0.5, 0, 0.3])
    assert found["error"] == pytest.approx(0.8 / 3)
    assert small.words(found) == (
        "0.750 [{low:.3f}, {high:.3f}], 0.1000 [{kl_low:.4f}, {kl_high:.4f}], 0.267".format(**found)
    )
    assert small.brief(found) == "0.750 0.1000 0.267"
    broken = Distance(*(part.double() for part in (*rows, squares[0] * float("nan"), squares[1])))
    with pytest.raises(RunError, match="logits or attention outputs are not finite"):
        small.summary([broken])


def test_text_and_the_limit(model, tmp_path):
    text = str(save_text(tmp_path / "words.txt"))
    read = column(model, text=text, limit=2)
    assert read.rows == 2 and read.settings["text"] == "words.txt" and read.settings["sequences"] == 2
    assert (read.prompt, read.length) == (16, 48)
    sampled = column(model)
    assert sampled.settings == {
        "task": "agreement",
        "text": "sampled from the model",
        "prefill": 16,
        "chunk": 7,
        "length": 48,
        "sequences": 3,
    }
    first, again = (torch.cat([made.tokens for made in one.batches()]) for one in (sampled, column(model)))
    other = build_task("agreement", SMALL).columns(subject(model, seed=8))[0]
    assert torch.equal(first, again) and not torch.equal(first[:2], other.batches()[0].tokens[:2])


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"prefill": 0}, "invalid value 0 for 'tasks.agreement.prefill' (a whole number, at least 1)"),
        ({"chunk": 1.5}, "invalid value 1.5 for 'tasks.agreement.chunk'"),
        ({"length": 1}, "invalid value 1 for 'tasks.agreement.length' (a whole number, at least 2)"),
        ({"tokens": None}, "invalid value None for 'tasks.agreement.tokens'"),
        ({"prefill": 512}, "prefill=512 leaves nothing to compare in sequences of length=512"),
        ({"title": "a\nb"}, "'tasks.agreement.title'"),
        ({"text": "nope.txt"}, "tasks.agreement.text: no file 'nope.txt'"),
        (
            {"text": {"split": "test"}},
            "'tasks.agreement.text' of the hub needs a name: {name: OWNER/DATASET, split: test}",
        ),
        ({"natural_spacing": "no"}, "'tasks.agreement.natural_spacing' must be true or false, got 'no'"),
        ({"layers": 3}, "unknown key 'tasks.agreement.layers'"),
    ],
)
def test_wrong_options(options, text):
    with pytest.raises(UsageError) as error:
        build_task("agreement", options)
    assert text in message(error)


def test_sequences_longer_than_the_model_and_text_that_is_too_short(model, tmp_path):
    with pytest.raises(
        UsageError, match="agreement takes 512 tokens and this model was made for 256; give a smaller length"
    ):
        build_task("agreement", {}).columns(subject(model))
    short = tmp_path / "short.txt"
    short.write_text("a few words")
    with pytest.raises(
        UsageError, match=r"tasks\.agreement: the text does not fill one sequence of 48 tokens; give more text"
    ):
        column(model, text=str(short))
