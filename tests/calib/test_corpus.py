"""Corpora: seeded, disjoint, packed to one length, and refused in one line."""

import json

import pytest
import torch
from toy_language_model import save_text, save_toy, toy_model, toy_tokenizer

from calib.capture.batches import TokenBatches
from calib.capture.corpus import divide, pack, text_blocks, text_sequences
from calib.capture.data import CaptureData
from calib.capture.generated import generated_sequences, sampled_text
from calib.documents.corpus import TextSource
from calib.errors import RunError, UsageError


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    return save_toy(tmp_path_factory.mktemp("model") / "toy")


def numbered(count: int) -> str:
    return "".join(f"{number:06d}\n" for number in range(count))


def test_pack_is_the_documents_in_order():
    documents = [[10, 11, 12], [13], [14, 15, 16, 17, 18]]
    assert list(pack(iter(documents), 1, 4, 9)) == [[1, 10, 11, 12], [1, 13, 14, 15], [1, 16, 17, 18]]
    assert list(pack(iter(documents), None, 4, 1)) == [[10, 11, 12, 13]]
    assert list(pack(iter([]), 1, 4, 2)) == []


def test_blocks_keep_every_character():
    text = numbered(1000) + "no end of line"
    blocks = text_blocks(text, 50)
    assert "".join(blocks) == text
    assert all(len(block) >= 50 for block in blocks[:-1])
    assert text_blocks("", 50) == []
    one_line = "x" * 175
    assert [len(block) for block in text_blocks(one_line, 50)] == [50, 50, 50, 25]


def test_no_token_is_measured_and_held_out():
    """Every line of the text is another number, so a token's position in the text can be read off the sequences."""
    tokenizer = toy_tokenizer()
    sequences = text_sequences(numbered(3000), tokenizer, 71, 40, seed=5, label="numbers")
    train, heldout, notes = divide(sequences, 30, 10, "numbers")
    assert (train.shape, heldout.shape, notes) == ((30, 71), (10, 71), [])
    assert bool((sequences[:, 0] == tokenizer.bos_token_id).all())

    def lines(part):  # whole lines only: a sequence may begin in the middle of one
        return {line for row in part for line in tokenizer.decode(row[1:]).split("\n")[1:-1]}

    assert len(lines(train)) > 200
    assert not lines(train) & lines(heldout)


def test_the_seed_chooses_the_positions():
    tokenizer = toy_tokenizer()
    one, same, other = (text_sequences(numbered(3000), tokenizer, 64, 8, seed, "numbers") for seed in (0, 0, 1))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_too_little_text():
    tokenizer = toy_tokenizer()
    with pytest.raises(
        UsageError, match=r"the corpus small\.txt is too short: 14 tokens do not fill one sequence of 64"
    ):
        text_sequences(numbered(2), tokenizer, 64, 8, 0, "small.txt")
    with pytest.raises(UsageError, match="it fills 1 sequence of 64 tokens"):
        divide(text_sequences(numbered(10), tokenizer, 64, 8, 0, "small.txt"), 6, 2, "small.txt")


def test_fewer_sequences_than_asked_keep_the_proportion_and_are_told():
    train, heldout, notes = divide(torch.zeros(8, 4), 12, 4, "some.txt")
    assert (len(train), len(heldout)) == (6, 2)
    assert notes == ["the corpus some.txt fills 8 of the 16 sequences asked for: 6 are measured, 2 held out"]


@pytest.mark.full
def test_generated_text_is_half_retrieval_half_sampled_and_seeded():
    model, tokenizer = toy_model(), toy_tokenizer()
    state = torch.random.get_rng_state()
    one = generated_sequences(model, tokenizer, 96, 5, seed=1)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.equal(one, generated_sequences(model, tokenizer, 96, 5, seed=1))
    other = generated_sequences(model, tokenizer, 96, 5, seed=2)
    assert not torch.equal(one[0], other[0])
    assert not torch.equal(one[1], other[1])
    assert one.shape == (5, 96)
    assert bool((one[:, 0] == 1).all())
    documents = "".join(tokenizer.decode(row[1:]) for row in one[0::2])
    assert "?" in documents
    assert "\n" in documents
    sampled = one[1::2, 1:]
    assert len(sampled.unique()) > 100  # a random model samples all over its vocabulary, documents use 40 characters


def test_sampled_text_goes_on_behind_an_end_of_text():
    """Also if the model's generation config would stop there; that config is the same afterwards."""
    model = toy_model()
    before = model.generation_config
    found = sampled_text(model, 1, 200, 6, seed=0)
    assert found.shape == (6, 200) and model.generation_config is before and before.eos_token_id == 2
    ends = (found == 2).nonzero()
    assert len(ends) > 0
    for row, at in ends.tolist():
        assert at > 195 or len(found[row, at + 1 :].unique()) > 2  # text, not padding


def test_batches_cover_the_sequences_once_over_all_processes_and_can_be_taken_up():
    sequences = torch.arange(22)[:, None].repeat(1, 3)
    for processes in (1, 2, 3, 4, 5, 9):
        seen = [
            int(row[0])
            for rank in range(processes)
            for batch in TokenBatches(sequences, 100, 4, rank=rank, processes=processes)
            for row in batch.tokens
        ]
        assert sorted(seen) == list(range(22))
        assert (
            len({len(TokenBatches(sequences, 100, 4, rank=rank, processes=processes)) for rank in range(processes)})
            == 1
        )
    whole = list(TokenBatches(sequences, 100, 4))
    rest = list(TokenBatches(sequences, 100, 4, skip=2))
    assert len(TokenBatches(sequences, 100, 4, skip=2)) == len(rest) == 4
    for one, two in zip(whole[2:], rest, strict=True):
        assert torch.equal(one.tokens, two.tokens)
        assert torch.equal(one.index, two.index)
    assert whole[1].index[0].tolist() == [312, 313, 314]  # sequence 104, three tokens each
    assert len(TokenBatches(sequences, 0, 4, skip=99)) == 0


def test_sequences_begin_anywhere_below_the_positions_asked_for():
    """First positions are spread evenly and depend on the sequence's number alone: the same in every process and after a resume."""
    sequences = torch.zeros(60, 128, dtype=torch.int64)
    began = torch.cat([batch.begins for batch in TokenBatches(sequences, 0, 8, positions=1128)])
    assert began[0] == 0 and int(began.min()) >= 0 and int(began.max()) <= 1000
    assert int(began.sort().values.diff().max()) < 50  # 60 sequences over 1,000 positions
    later = torch.cat([batch.begins for batch in TokenBatches(sequences[16:], 16, 8, positions=1128)])
    assert torch.equal(later, began[16:])
    second = torch.cat([batch.begins for batch in TokenBatches(sequences, 0, 8, rank=1, processes=2, positions=1128)])
    assert torch.equal(second, torch.cat([began[8:16], began[24:32], began[40:48], began[56:]]))
    for positions in (0, 100, 128):
        assert not torch.cat([batch.begins for batch in TokenBatches(sequences, 0, 8, positions=positions)]).any()


def test_data_from_files_and_folders(toy, tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    save_text(folder / "a.txt", 60)
    save_text(folder / "b.txt", 60)
    (folder / ".hidden").write_bytes(b"\xff\xff")
    data = CaptureData(str(toy), text=str(folder), length=64, sequences=12, heldout_sequences=4)
    _, _, corpus = data.load()
    assert corpus.train.shape == (12, 64)
    assert corpus.heldout.shape == (4, 64)
    assert corpus.origin["name"] == "a.txt, b.txt"
    assert str(tmp_path) not in str(corpus.origin)
    again = CaptureData(
        str(toy), text=[str(folder / "a.txt"), str(folder / "b.txt")], length=64, sequences=12, heldout_sequences=4
    )
    assert again.load()[2].origin["tokens_sha256"] == corpus.origin["tokens_sha256"]


def test_a_data_set_with_splits(toy, tmp_path, monkeypatch):
    """A folder stands in for the hub: the `datasets` library reads both the same way."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "texts"
    folder.mkdir()
    save_text(folder / "train.txt", 60)
    (folder / "validation.txt").write_text(numbered(400))
    options = {"name": str(folder), "length": 64, "sequences": 6, "heldout_sequences": 3}
    _, tokenizer, corpus = CaptureData(str(toy), heldout_split="validation", **options).load()
    assert (len(corpus.train), len(corpus.heldout)) == (6, 3)
    assert set(tokenizer.decode(corpus.heldout[:, 1:].flatten())) <= set("0123456789\n")
    assert not set(tokenizer.decode(corpus.train[:, 1:].flatten())) & set("0123456789")
    assert corpus.origin["sha256"] != corpus.origin["heldout_sha256"]
    _, _, same_split = CaptureData(str(toy), **options).load()
    assert not set(tokenizer.decode(same_split.heldout[:, 1:].flatten())) & set("0123456789")
    assert "heldout" not in same_split.origin


def test_a_column_with_nulls_is_read_and_one_of_numbers_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "rows"
    folder.mkdir()
    rows = [{"text": "one", "n": 1}, {"text": None, "n": 2}, {"text": "", "n": 3}, {"text": "four\n", "n": 4}]
    (folder / "train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert TextSource(name=str(folder), natural_spacing=False).read() == "one\n\n\nfour\n"
    with pytest.raises(UsageError, match=r"column 'n' holds 1, expected text; name another one \(of text, n\)"):
        TextSource(name=str(folder), column="n").read()
    with pytest.raises(RunError, match=r"cannot get .* nope \(ValueError: .*nope.*train.*\); check its name"):
        TextSource(name=str(folder), split="nope").read()


def test_length_is_cut_to_what_the_model_was_made_for(toy, tmp_path):
    data = CaptureData(str(toy), text=str(save_text(tmp_path / "a.txt")), length=1000, sequences=2, heldout_sequences=2)
    assert data.load()[2].length == 256
    assert data.notes == ["data.length=1000 is cut to 256, the longest this model was made for"]


def test_positions_are_cut_to_what_the_model_was_made_for(toy, tmp_path):
    text = str(save_text(tmp_path / "a.txt"))
    data = CaptureData(str(toy), text=text, positions=1000, length=64, sequences=2, heldout_sequences=2)
    assert data.load()[2].origin["positions"] == 256
    assert data.notes == ["data.positions=1000 is cut to 256, all that this model was made for"]
    assert int(next(iter(data.train_dataloader())).begins[1]) == 119  # the golden ratio of 0 ... 192


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": 31}, "data.length=31: must be at least 32"),
        ({"positions": 31}, "data.positions=31: must be at least 32"),
        ({"sequences": 0}, "data.sequences=0: must be at least 1"),
        ({"batch_size": -1}, "data.batch_size=-1: must be at least 1"),
        ({"name": None}, "no corpus: give data.text=FILE"),
        ({"text": "nowhere.txt"}, "data.text: no file or folder 'nowhere.txt'"),
        ({"model_dtype": "int8"}, "model.dtype='int8': one of float32, bfloat16, float16"),
    ],
)
def test_refusals(toy, options, message):
    with pytest.raises(UsageError) as caught:
        CaptureData(str(toy), **options)
    assert message in str(caught.value)


@pytest.mark.full
def test_a_share_of_a_text_is_sampled_from_the_model(toy, tmp_path):
    text = str(save_text(tmp_path / "text.txt"))

    def corpus(**more):
        sizes = {"length": 64, "sequences": 8, "heldout_sequences": 2}
        return CaptureData(str(toy), text=text, **sizes, **more).load()[2]

    plain, mixed = corpus(), corpus(sampled=0.25)
    model, tokenizer, _ = CaptureData(str(toy), length=64).load()
    own = sampled_text(model, tokenizer.bos_token_id, 64, 2, 0)
    assert torch.equal(mixed.train[[2, 6]], own)
    assert torch.equal(mixed.train[[0, 1, 3, 4, 5, 7]], plain.train[:6])
    assert mixed.origin["sampled"] == 2 and "sampled" not in plain.origin
    pieces = corpus(sampled=0.25, sampled_length=32)
    assert torch.equal(pieces.train[[2, 6]].view(4, 32), sampled_text(model, tokenizer.bos_token_id, 32, 4, 0))
    assert pieces.origin["sampled_length"] == 32 and "sampled_length" not in mixed.origin
    assert len(corpus(sampled=0.99).train) == 8
    for stretch in (31, 33, 48):
        with pytest.raises(
            UsageError, match=rf"data.sampled_length={stretch}: at least 32, and a divisor of data.length=64"
        ):
            corpus(sampled=0.25, sampled_length=stretch)
    for share, name in ((1.0, "x/y"), (-0.1, "x/y"), (0.5, "generated")):
        with pytest.raises(UsageError, match=r"data.sampled=.*from 0 to below 1"):
            CaptureData(str(toy), name=name, sampled=share)
