"""What the embedded model is measured with: the trigram, intervals, scores, and the profile of keys and attention."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from toy_pretraining import PROSE

from benchmarks.embedded_model import model_card
from benchmarks.embedded_model import scores as score_module
from benchmarks.embedded_model.language_model import LanguageModel
from benchmarks.embedded_model.scores import scores
from benchmarks.embedded_model.trigram import KneserNey
from benchmarks.key_profile import page as key_page
from benchmarks.key_profile.profile import attention_shares, profile, spread
from benchmarks.key_profile.words import sink_words
from calib.errors import UsageError
from calib.evaluate.proportion import Proportion

# --- trigram


def test_trigram_probabilities_sum_to_one():
    rng = np.random.default_rng(0)
    model = KneserNey(rng.zipf(1.5, 4000).clip(max=19), 20)
    for context in ([1, 1], [19, 7], [0, 0]):  # often seen, seldom, never
        runs = np.array([model.probabilities(np.array([*context, w]))[0] for w in range(20)])
        assert runs.sum() == pytest.approx(1)
        assert (runs > 0).all()


def test_trigram_by_hand():
    """a b a b a c over {a, b, c}: every number counted on paper; one discount an order, n1 / (n1 + 2 n2)."""
    model = KneserNey(np.array([0, 1, 0, 1, 0, 2]), 3)
    # trigrams aba 2, bab 1, bac 1: D = 2/4. Types before a gram: ba 1, ab 1, ac 1: D = 1 (n1 = 3, n2 = 0).
    # types before a token, among those three bigrams: a 1, b 1, c 1: D = 1.
    unigram = np.full(3, 1 / 3)
    b_after_a = (1 - 1) / 2 + 1 * 2 / 2 * unigram[1]
    expected = (1 - 0.5) / 2 + 0.5 * 2 / 2 * b_after_a
    assert model.probabilities(np.array([1, 0, 1])) == pytest.approx([expected])


def test_a_trigram_knows_more_than_the_share_of_tokens():
    rng = np.random.default_rng(1)
    tokens = np.cumsum(rng.integers(1, 3, 6000)) % 50  # one of two followers, each as likely
    model = KneserNey(tokens[:5000], 50)
    assert model.perplexity(tokens[5000:]) == pytest.approx(2, rel=0.1)
    assert model.perplexity(rng.integers(0, 50, 1000)) > 50


def test_trigram_refuses_what_it_cannot_count():
    with pytest.raises(ValueError, match="at least 3"):
        KneserNey(np.array([1, 2]), 5)
    with pytest.raises(ValueError, match="token 7"):
        KneserNey(np.array([1, 2, 7]), 5)


# --- scores


def test_wilson_interval():
    assert Proportion(495, 500).interval == pytest.approx((0.97681, 0.99572), abs=1e-5)
    low, high = Proportion(10, 10).interval
    assert (low, high) == pytest.approx((0.72247, 1), abs=1e-5)
    assert Proportion(0, 10).interval[0] == 0


def test_scores_name_every_figure(tokenizer):
    torch.manual_seed(0)
    model = LanguageModel(2048, layers=1, hidden=32, mlp=48, heads=2, kv_heads=1, head_dim=16).model.eval()
    figures = scores(model, tokenizer, PROSE * 60, PROSE * 200, cases=5)
    skills = [name for name, value in figures.items() if isinstance(value, dict)]
    assert "retrieval_20_lines" in skills and "multi_query_20_lines_4_queries" in skills
    assert "needle_512_tokens_depth_80_100" in skills and "retrieval_20_lines_number_keys" in skills
    assert {value["cases"] for name, value in figures.items() if name in skills} == {5, 1}
    assert figures["trigram_perplexity"] < 1.2  # one sentence, again and again
    assert figures["perplexity"] > 500  # random weights
    json.dumps(figures)


def test_right_answers_are_counted_row_by_row(tokenizer, monkeypatch):
    """A model that repeats what it reads is right where the next token is the same one, and nowhere else."""

    def same_again(input_ids):
        return SimpleNamespace(logits=torch.nn.functional.one_hot(input_ids, 2048).float())

    ids = torch.tensor([[1, 5, 5, 5]] * 25 + [[1, 5, 6, 6]] * 5)
    labels = ids.clone()
    labels[:, :2] = -100
    right = score_module.right_answers(same_again, {"input_ids": ids, "labels": labels})
    assert right == [True] * 25 + [False] * 5


# --- keys


def test_spread_of_known_states():
    torch.manual_seed(0)
    states = torch.randn(2, 4000, 16)
    flat = spread(states)
    assert flat.rank == pytest.approx(16, rel=0.01)
    assert flat.directions == 15
    assert flat.largest == pytest.approx(1, abs=0.1)
    assert flat.outliers == 0
    states[:, :, 3] *= 10
    states[:, :, 8:] = 0.1 * states[:, :, :8]
    bent = spread(states)
    assert bent.rank < 6
    assert bent.directions == 1  # one channel and its copy hold more than 90 %
    assert spread(torch.cat([states[..., :8]] * 2, -1)).outliers == 2 / 16


def test_attention_shares_of_known_attention():
    tokens, heads = 300, 2
    sample = SimpleNamespace(
        layer=0,
        window=None,
        softcap=None,
        scaling=1.0,
        queries=torch.zeros(1, heads, tokens, 4),
        keys=torch.zeros(1, 1, tokens, 4),
    )
    first, mass = attention_shares(sample)  # every token alike
    seen = torch.arange(100, 301).double()
    assert first.item() == pytest.approx((1 / seen).mean().item())
    assert mass.tolist() == pytest.approx(
        [(((seen * p / 100).ceil()) / seen).mean().item() for p in (1, 5, 10)], rel=0.01
    )
    sample.queries[...] = 10.0
    sample.keys[:, :, 0] = 10.0  # all on the first token
    first, mass = attention_shares(sample)
    assert first.item() == pytest.approx(1)
    assert mass.tolist() == pytest.approx([1, 1, 1])
    sample.window = 64
    with pytest.raises(ValueError, match="window of 64"):
        attention_shares(sample)


def test_profile_sees_every_layer_before_and_after_rope():
    torch.manual_seed(0)
    model = LanguageModel(300, layers=2, hidden=32, mlp=48, heads=4, kv_heads=2, head_dim=8).model.eval()
    one, two = profile(model, torch.randint(3, 300, (2, 128)))
    assert (one.layer, two.layer, one.head_dim) == (0, 1, 8)
    assert one.before is not None and one.before != one.keys
    assert 0 < one.sink < 1 and one.top[0] < one.top[1] < one.top[2] < 1
    with pytest.raises(ValueError, match="100 tokens"):
        profile(model, torch.randint(3, 300, (2, 64)))


def test_words_follow_the_numbers():
    even = sum(1 / n for n in range(100, 513)) / 413
    quiet, sink = (SimpleNamespace(layer=3, sink=share * even) for share in (9, 11))
    assert "does not represent models with attention sinks" in sink_words([quiet], 512)
    assert "in layer 3:" in sink_words([quiet, sink], 512)


@pytest.mark.full
def test_the_page_is_written_by_one_command(tmp_path, monkeypatch):
    text = tmp_path / "some.txt"
    text.write_text("The river ran past the old mill by the town. Nobody could say how old it was.\n" * 300)
    page = tmp_path / "results/page.md"
    words = ["page", "artifacts/tiny-llama", "--text", str(text), "--output", str(page)]
    monkeypatch.setattr("sys.argv", words)
    key_page.main()
    written = page.read_text()
    assert written.count("| layer |") == 4
    assert "## tiny-llama on keyed lines" in written
    assert str(tmp_path) not in written
    first = page.read_bytes()
    key_page.main()
    assert page.read_bytes() == first


def test_a_model_without_a_record_has_no_card(tmp_path):
    with pytest.raises(UsageError, match="no training record"):
        model_card.write_card(tmp_path, "", None)


def test_numbers_of_the_card():
    assert model_card.row("retrieval_20_lines", Proportion(495, 500).as_dict()) == (
        "| retrieval 20 lines | 0.990 | 0.977 to 0.996 | 500 |"
    )
    assert model_card.row("perplexity", math.e) == "| perplexity | 2.718 | | |"
