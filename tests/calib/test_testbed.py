"""The testbed: generated documents, tokenizer, curriculum, masked loss, exact resume, export."""

import json
import re
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import datasets
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer

from calib.cli import main
from calib.errors import RunError, UsageError
from calib.testbed.corpus import TextSource, natural_spacing
from calib.testbed.curriculum import IGNORED, Curriculum, Phase, document_rows
from calib.testbed.generators import copying, keyed_lines, keyed_random, retrieval_cases, split_of
from calib.testbed.language_model import LanguageModel, schedule
from calib.testbed.scores import exact_answers, perplexity, retrieval_batch, token_windows
from calib.testbed.tokenizer import train_tokenizer
from calib.testbed.words import WORDS

PROSE = "The river ran past the mill, and nobody there could say how old the mill was in 1906.\n"


@pytest.fixture(scope="module")
def tokenizer():
    """Large enough that every word of the documents is one token."""
    return train_tokenizer(PROSE * 20, vocabulary=2048, documents=300)


@pytest.fixture(scope="module")
def prose(tmp_path_factory):
    """A file of made-up text with some variety."""
    rng = keyed_random("prose")
    lines = (" ".join(rng.choice(WORDS) for _ in range(9)) + ".\n" for _ in range(300))
    file = tmp_path_factory.mktemp("text") / "prose.txt"
    file.write_text("".join(lines), encoding="utf-8")
    return file


# --- generators


def test_documents_depend_on_the_key_alone():
    def document(*key):
        return list(keyed_lines(keyed_random(*key), 12, queries=3))

    assert document(1, 2) == document(1, 2)
    assert document(1, 2) != document(1, 3)
    assert retrieval_cases(0, 5, 10) == retrieval_cases(0, 8, 10)[:5]


def test_the_generator_is_the_same_in_every_version():
    """Written down once: a change here changes every fitted and trained thing that is made from seeds."""
    case = retrieval_cases(0, 1, 2, digits=2)[0]
    assert (case.prompt, case.answer) == ("line glass: 12\nline brick: 42\n?\nline glass: ", "12")


@settings(deadline=None, max_examples=40)
@given(
    lines=st.integers(1, 60),
    queries=st.integers(0, 90),
    digits=st.integers(1, 6),
    style=st.sampled_from(["line", "plain"]),
    split=st.sampled_from(["train", "eval"]),
    seed=st.integers(0, 1000),
)
def test_every_answer_stands_in_its_document(lines, queries, digits, style, split, seed):
    document = list(keyed_lines(keyed_random(seed), lines, queries, digits, style, split))
    text = "".join(piece.text for piece in document)
    context, _, asked = text.partition("?\n")
    pairs = dict(re.findall(r"(?:line )?(\w+):? (\d+)\n", context))
    assert len(pairs) == lines  # no key twice
    assert {len(number) for number in pairs.values()} == {digits}
    assert {split_of(word, number) for word, number in pairs.items()} == {split}
    answers = [piece.text for piece in document if piece.is_answer]
    asked_words = re.findall(r"(?:line )?(\w+):? \d+\n", asked)
    assert answers == [pairs[word] for word in asked_words]
    assert len(answers) == queries
    assert len(set(asked_words[:lines])) == min(lines, queries)


def test_training_and_evaluation_share_no_pair():
    seen = {split: set() for split in ("train", "eval")}
    for split, pairs in seen.items():
        for index in range(200):
            text = "".join(piece.text for piece in keyed_lines(keyed_random(index), 40, 0, 1, "plain", split))
            pairs |= set(re.findall(r"(\w+) (\d)", text))
    assert not seen["train"] & seen["eval"]
    assert {word for word, _ in seen["train"]} == {word for word, _ in seen["eval"]} == set(WORDS)
    assert len(seen["eval"]) == 2 * len(WORDS)  # one digit in five


def test_copying_repeats_its_sequence():
    first, *rest = copying(keyed_random(5), 30, repeats=3)
    assert not first.is_answer
    assert [(piece.text, piece.is_answer) for piece in rest] == [(first.text, True)] * 3
    assert len(first.text.split()) == 30


@pytest.mark.parametrize("wrong", [{"lines": 0}, {"lines": 10_000}, {"digits": 0}, {"queries": -1}, {"style": "poem"}])
def test_impossible_documents_are_refused(wrong):
    with pytest.raises(ValueError, match=f"{next(iter(wrong))}="):
        list(keyed_lines(keyed_random(0), **{"lines": 5, **wrong}))


# --- text


def test_natural_spacing_of_tokenised_text():
    tokenised = 'He said , " a role @-@ playing game ( of 3 @.@ 5 m ) " ; it \'s old . \n = Title = \n'
    assert natural_spacing(tokenised) == 'He said, "a role-playing game (of 3.5 m)"; it\'s old. \n = Title = \n'


def test_text_that_cannot_be_had_is_one_clear_error(tmp_path):
    with pytest.raises(UsageError, match=r"gone\.txt"):
        TextSource(text=[tmp_path / "gone.txt"]).read()
    (tmp_path / "empty.txt").write_text(" \n")
    with pytest.raises(RunError, match=r"empty\.txt is empty"):
        TextSource(text=[tmp_path / "empty.txt"]).read()
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(UsageError, match="not UTF-8"):
        TextSource(text=[tmp_path / "latin.txt"]).read()
    with pytest.raises(UsageError, match="no text"):
        TextSource().read()


def test_a_hub_name_without_network_says_what_to_do(monkeypatch):
    def unreachable(*arguments, **options):
        raise ConnectionError("Name or service not known")

    monkeypatch.setattr("datasets.load_dataset", unreachable)
    with pytest.raises(RunError, match=r"cannot get owner/name train .* without network give local text files"):
        TextSource(name="owner/name").read()


def test_hub_rows_are_joined_by_lines(monkeypatch):
    rows = datasets.Dataset.from_dict({"text": [" = T = \n", "no end of line"]})
    monkeypatch.setattr("datasets.load_dataset", lambda *arguments, **options: rows)
    assert TextSource(name="owner/name", natural_spacing=False).read() == " = T = \nno end of line\n"
    with pytest.raises(UsageError, match=r"no column 'body' \(one of text\)"):
        TextSource(name="owner/name", column="body").read()


# --- tokenizer


def test_digits_are_single_and_words_are_whole(tokenizer):
    assert tokenizer("1906").input_ids[0] == tokenizer.bos_token_id == 1
    assert tokenizer.tokenize("1906 77") == [*"1906", "Ġ", *"77"]
    assert [word for word in WORDS if len(tokenizer.tokenize(word)) + len(tokenizer.tokenize(f" {word}")) != 2] == []
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 2)
    assert len(tokenizer) <= 2048


@settings(deadline=None)
@given(text=st.text(max_size=60))
def test_every_string_makes_the_round_trip(tokenizer, text):
    assert tokenizer.decode(tokenizer(text).input_ids[1:]) == text


def test_a_saved_tokenizer_is_the_same(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    text = "line rain: 4821\n?\nÉtude…"
    assert again(text).input_ids == tokenizer(text).input_ids


def test_a_vocabulary_below_the_bytes_is_refused():
    with pytest.raises(ValueError, match="at least 259"):
        train_tokenizer(PROSE, vocabulary=200, documents=0)


# --- curriculum


PHASES = [Phase(0.5, rows=6, length=64, text=0.0, copying=0.5), Phase(0.5, rows=4, length=96, text=0.5)]


def curriculum(tokenizer, steps=10, seed=0):
    text = torch.arange(300, 1300).to(torch.uint16).numpy()
    return Curriculum(PHASES, steps, tokenizer, text, seed)


def test_a_step_is_a_pure_function_of_seed_and_step(tokenizer):
    one, other = curriculum(tokenizer), curriculum(tokenizer)
    list(map(one.batch, range(4)))  # what was drawn before does not matter
    assert torch.equal(one.batch(7)["input_ids"], other.batch(7)["input_ids"])
    assert not torch.equal(one.batch(7)["input_ids"], one.batch(8)["input_ids"])
    assert not torch.equal(one.batch(7)["input_ids"], curriculum(tokenizer, seed=1).batch(7)["input_ids"])


def test_phases_follow_their_shares(tokenizer):
    shapes = [tuple(curriculum(tokenizer).batch(step)["input_ids"].shape) for step in range(10)]
    assert shapes == [(6, 64)] * 5 + [(4, 96)] * 5


def test_labels_are_the_tokens_of_text_and_answers(tokenizer):
    early, late = curriculum(tokenizer).batch(0), curriculum(tokenizer).batch(9)
    for batch in (early, late):
        labelled = batch["labels"] != IGNORED
        assert torch.equal(batch["labels"][labelled], batch["input_ids"][labelled])
        assert labelled.any(dim=1).all()
        assert (batch["input_ids"][:, 0] == tokenizer.bos_token_id).all()
    assert torch.equal(late["labels"][:2], late["input_ids"][:2])  # half the rows are language
    for ids, labels in zip(late["input_ids"][2:], late["labels"][2:], strict=True):
        answers = tokenizer.decode(labels[labels != IGNORED])
        assert answers.isdigit()
        assert "?" in tokenizer.decode(ids)


def test_pieces_give_the_tokens_of_the_whole_text(tokenizer):
    for index in range(20):
        style = "line" if index % 2 else "plain"
        pieces = list(keyed_lines(keyed_random(index), 8, queries=6, digits=1 + index % 4, style=style))
        whole = tokenizer("".join(piece.text for piece in pieces)).input_ids
        ((ids, labels),) = document_rows(tokenizer, [pieces], len(whole))
        assert ids == whole
        assert tokenizer.decode([i for i in labels if i != IGNORED]) == "".join(p.text for p in pieces if p.is_answer)


def test_impossible_curricula_are_refused(tokenizer):
    text = torch.zeros(50, dtype=torch.uint16).numpy()
    with pytest.raises(ValueError, match=r"sum to 0\.9"):
        Curriculum([Phase(0.9, 1, 64)], 10, tokenizer, text, 0)
    with pytest.raises(ValueError, match="50 tokens"):
        Curriculum([Phase(1, 1, 64)], 10, tokenizer, text, 0)
    with pytest.raises(ValueError, match="length=16"):
        Curriculum([Phase(1, 1, 16)], 10, tokenizer, text, 0)
    with pytest.raises(ValueError, match=r"text=1\.5"):
        Phase(1, 1, 64, text=1.5)


# --- model


def toy_model(vocabulary=2048):
    torch.manual_seed(0)
    return LanguageModel(vocabulary, layers=1, hidden=32, mlp=48, heads=2, kv_heads=1, head_dim=16, warmup_steps=2)


def test_the_loss_is_that_of_the_labelled_tokens_only(tokenizer):
    model, batch = toy_model(), curriculum(tokenizer).batch(9)
    logits = model.model(input_ids=batch["input_ids"]).logits
    by_hand = functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=IGNORED
    )
    torch.testing.assert_close(model.masked_loss(**batch), by_hand)
    unmasked = model.masked_loss(batch["input_ids"], batch["input_ids"])
    assert (unmasked - by_hand).abs() > 1e-3


def test_exact_answers_is_greedy_decoding(tokenizer):
    model = toy_model().model.eval()
    batch = retrieval_batch(tokenizer, seed=3, count=4, lines=3)
    prompt = batch["input_ids"][:, :-4]
    answers = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=4, do_sample=False)
    forged = torch.where(torch.arange(4)[:, None] < 2, answers, batch["input_ids"])  # two rows right by construction
    labels = forged.clone()
    labels[:, :-4] = IGNORED
    assert exact_answers(model(input_ids=forged).logits, labels).tolist() == [True, True, False, False]


def test_perplexity_of_a_uniform_model_is_the_vocabulary(tokenizer):
    model = toy_model().model.eval()
    torch.nn.init.zeros_(model.lm_head.weight)
    text = PROSE * 40
    figures = perplexity(model, tokenizer, text, length=64)
    assert figures["perplexity"] == pytest.approx(2048, rel=1e-4)
    tokens = sum(len(tokenizer(PROSE).input_ids) - 1 for _ in range(40))
    assert figures["bits_per_character"] == pytest.approx(11 * tokens / len(text), rel=1e-4)


def test_windows_cover_the_stream_once():
    windows = token_windows(torch.arange(10, 110).numpy(), 26, bos=1)
    assert torch.cat([window[1:] for window in windows]).tolist() == list(range(10, 110))
    assert {int(window[0]) for window in windows} == {1}
    with pytest.raises(ValueError, match="at least 199"):
        token_windows(torch.arange(100).numpy(), 200, bos=1)


def test_schedule_warms_up_and_ends_at_the_fraction():
    values = [schedule(step, 100, 10, 0.03) for step in range(101)]
    assert values[0] == pytest.approx(0.1)
    assert max(values) == values[9] == values[10] == 1
    assert values[100] == pytest.approx(0.03)
    assert all(a >= b for a, b in pairwise(values[10:]))


def test_uneven_heads_are_refused():
    with pytest.raises(ValueError, match="heads=4, kv_heads=3"):
        LanguageModel(heads=4, kv_heads=3)


# --- the command


def pretrain(folder: Path, prose: Path, *more: str) -> int:
    """A toy run of six steps with a checkpoint after every second."""
    phases = "[{share: 0.5, rows: 2, length: 80, text: 0, copying: 0.5}, {share: 0.5, rows: 2, length: 96}]"
    toy = {
        "model": {"vocabulary": 600, "layers": 1, "hidden": 32, "mlp": 48, "heads": 2, "kv_heads": 1, "head_dim": 16},
        "data.vocabulary": 600,
        "data.phases": phases,
        "data.train.text": f"[{prose}]",
        "data.validation.text": f"[{prose}]",
        "data.validation_windows": 2,
        "data.validation_cases": 2,
        "data.tokenizer": folder / "tokenizer",
        "checkpoint": {"every_n_train_steps": 2},
        "output": folder / "model",
        "score_cases": 2,
        "trainer.max_steps": 6,
        "trainer.precision": "32-true",
        "trainer.val_check_interval": 3,
        "trainer.log_every_n_steps": 1,
        "trainer.default_root_dir": folder / "run",
        "trainer.enable_progress_bar": "false",
        "trainer.enable_model_summary": "false",
    }
    words = []
    for key, value in toy.items():
        for name, part in value.items() if isinstance(value, dict) else [(None, value)]:
            words += [f"--{key}.{name}" if name else f"--{key}", str(part)]
    return main(["pretrain", "--config", "configs/tiny_lm.yaml", *words, *more])


@pytest.fixture
def losses(monkeypatch):
    """Every step's loss as the run computed it, and a switch that makes a step fail like a killed process."""
    record, fail_at, step_of = [], [], LanguageModel.training_step

    def observed(self, batch, batch_index):
        if self.global_step in fail_at:
            raise RuntimeError("the power went")
        loss = step_of(self, batch, batch_index)
        record.append((self.global_step, loss.item()))
        return loss

    monkeypatch.setattr(LanguageModel, "training_step", observed)
    return SimpleNamespace(record=record, fail_at=fail_at)


def test_an_interrupted_run_resumes_exactly(prose, tmp_path, losses, capsys):
    assert pretrain(tmp_path / "straight", prose, "--trainer.logger", "false") == 0
    straight = dict(losses.record)
    assert list(straight) == list(range(6))
    assert len(set(straight.values())) == 6

    losses.record.clear()
    losses.fail_at.append(5)
    assert pretrain(tmp_path / "broken", prose, "--trainer.logger", "false") == 1
    assert not (tmp_path / "broken/model").exists()
    losses.fail_at.clear()
    assert pretrain(tmp_path / "broken", prose, "--trainer.logger", "false", "--ckpt_path", "last") == 0
    assert [step for step, _ in losses.record] == [0, 1, 2, 3, 4, 4, 5]  # the checkpoint is after four steps
    assert all(loss == straight[step] for step, loss in losses.record)
    files = [tmp_path / run / "model/model.safetensors" for run in ("straight", "broken")]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_the_export_is_a_model_that_transformers_loads(prose, tmp_path):
    folder = tmp_path / "model"
    assert pretrain(tmp_path, prose, "--trainer.logger", "false") == 0
    assert {file.name for file in folder.iterdir()} == {
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    assert model.dtype == torch.float16
    assert model.config.tie_word_embeddings
    inputs = tokenizer("line rain: 48", return_tensors="pt", return_token_type_ids=False)
    out = model.float().generate(**inputs, max_new_tokens=3, do_sample=False)
    assert tokenizer.decode(out[0]).startswith("<s>line rain: 48")
    card = (folder / "README.md").read_text()
    assert "6 steps" in card
    assert re.search(r"20 lines \(2 fresh cases\) \| [01]\.\d{3} \|", card)
    assert "calib pretrain --config configs/tiny_lm.yaml \\\n        --data.train.text '[prose.txt]'" in card
    for file in folder.glob("*.json"):
        assert str(tmp_path) not in json.dumps(json.loads(file.read_text()))
    assert str(tmp_path) not in card


def test_pretrain_refuses_in_one_line(prose, tmp_path, capsys):
    def message(*more):
        status = pretrain(tmp_path, prose, "--trainer.logger", "false", *more)
        text = capsys.readouterr().err.strip().splitlines()[-1]
        return status, text

    assert message("--ckpt_path", "last") == (
        2,
        f"calib: error: no checkpoint {tmp_path}/run/checkpoints/last.ckpt: "
        "start without --ckpt_path, or name an existing one",
    )
    assert message("--trainer.max_steps", "-1")[0] == 2
    status, text = message("--data.vocabulary", "700")
    assert status == 2
    assert "data.vocabulary=700 and model.vocabulary=600 differ" in text
    assert message("--data.train.text", f"[{tmp_path}/gone.txt]")[0] == 2
    (tmp_path / "model").mkdir()
    (tmp_path / "model/thesis.txt").write_text("years of work")
    status, text = message()
    assert status == 2
    assert "is not a model folder" in text
    assert (tmp_path / "model/thesis.txt").exists()
    (tmp_path / "model/thesis.txt").unlink()
    assert message()[0] == 0
    status, text = message("--data.seed", "7")  # the tokenizer there was trained with seed 0
    assert status == 2
    assert "trained with seed=0, this run asks for 7" in text
