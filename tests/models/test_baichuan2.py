"""`calib convert baichuan2`: the converted model has the logits and tokens of the published one; other input is refused in one
line."""

import json
from pathlib import Path

import pytest
import sentencepiece as sentencepiece_library
import torch
from models import baichuan2
from models.baichuan2 import JOINED, LETTERS, TOKENS, save, sentencepiece
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from calib.cli import main
from calib.convert.sentencepiece_tokenizer import sentencepiece_tokenizer

INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("baichuan2")
    save(folder / "own")
    assert main(["convert", "baichuan2", str(folder / "own"), str(folder / "llama")]) == 0
    return folder / "llama"


def numbers(*pieces: str) -> list[int]:
    """Token numbers of pieces."""
    texts = [text for text, _ in TOKENS]
    return [texts.index(piece) for piece in pieces]


def test_the_logits_are_the_publishers(converted):
    model = AutoModelForCausalLM.from_pretrained(converted)
    assert type(model).__name__ == "LlamaForCausalLM" and model.config.num_key_value_heads == 2
    tokens = torch.randint(len(TOKENS), (2, 70), generator=torch.Generator().manual_seed(0))
    expected = baichuan2.logits(baichuan2.tensors(), tokens)
    assert expected.std() > 0.3
    torch.testing.assert_close(model(tokens).logits, expected, rtol=1e-4, atol=1e-4)
    # A checkpoint in one file gives the same.
    whole = save(converted.parent / "whole", shards=1)
    (whole / "model-00001-of-00001.safetensors").rename(whole / "model.safetensors")
    (whole / "model.safetensors.index.json").unlink()
    assert main(["convert", "baichuan2", str(whole), str(converted.parent / "from_whole")]) == 0
    again = AutoModelForCausalLM.from_pretrained(converted.parent / "from_whole").state_dict()
    assert all(torch.equal(again[name], weight) for name, weight in model.state_dict().items())


def test_shards_stay_shards_and_nothing_else_is_left(converted):
    index = json.loads((converted / "model.safetensors.index.json").read_text())
    held = {shard: load_file(converted / shard) for shard in set(index["weight_map"].values())}
    assert len(held) == 2
    assert index["weight_map"] == {name: shard for shard, weights in held.items() for name in weights}
    assert index["metadata"]["total_size"] == sum(w.nbytes for weights in held.values() for w in weights.values())
    assert {path.name for path in converted.parent.iterdir()} <= {"own", "llama", "whole", "from_whole"}


def test_the_tokenizer_needs_no_remote_code(converted):
    tokenizer = AutoTokenizer.from_pretrained(converted)
    # The merge of "al" has the last rank: its letters have been merged into "ka" and "lo" before.
    joined = tokenizer("kalo lo  mi\n12é<reserved_106>ka")["input_ids"]
    assert joined == numbers(
        *("kalo", "▁lo", "▁", "▁", "mi", "\n", "1", "2", "<0xC3>", "<0xA9>", "<reserved_106>", "ka")
    )
    assert tokenizer.decode(joined) == "kalo lo  mi\n12é<reserved_106>ka"
    assert tokenizer.decode(tokenizer("  ka 日本 ")["input_ids"]) == "  ka 日本 "
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 0)
    assert tokenizer.padding_side == "left" and tokenizer.model_max_length == 4096
    assert len(tokenizer) == len(TOKENS) == 260 + len(LETTERS) + len(JOINED)


@pytest.mark.parametrize(("prefix", "strip"), [(False, False), (False, True), (True, False), (True, True)])
def test_the_tokens_are_those_of_the_sentencepiece_library(tmp_path, prefix, strip):
    text = "".join(Path(name).read_text() for name in ("CONTRIBUTING.md", "calib/fit/calibration.py"))
    sentencepiece_library.SentencePieceTrainer.train(
        sentence_iterator=iter([line for line in text.splitlines() if line.strip()]),
        model_prefix=str(tmp_path / "tokenizer"),
        model_type="bpe",
        vocab_size=900,
        byte_fallback=True,
        split_digits=True,
        normalization_rule_name="identity",
        add_dummy_prefix=prefix,
        remove_extra_whitespaces=strip,
        user_defined_symbols=[] if prefix else ["▁▁▁▁", "<reserved_106>"],
        minloglevel=2,
    )
    theirs = sentencepiece_library.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    ours = sentencepiece_tokenizer(tmp_path / "tokenizer.model", {"unk_token": "<unk>"})
    more = ["", "  two  spaces ", "\ttab\n\nline", "日本語 123 é😀", "a<reserved_106>b"]
    for piece in [*(text[start : start + 190] for start in range(0, len(text), 97)), *more]:
        tokens = theirs.encode(piece)
        assert ours(piece)["input_ids"] == tokens, piece
        assert ours.decode(tokens) == theirs.decode(tokens)


def test_a_first_token_is_added_where_the_model_wants_one(tmp_path):
    settings = json.loads((save(tmp_path / "own") / "tokenizer_config.json").read_text())
    (tmp_path / "own/tokenizer_config.json").write_text(json.dumps(settings | {"add_bos_token": True}))
    assert main(["convert", "baichuan2", str(tmp_path / "own"), str(tmp_path / "llama")]) == 0
    assert AutoTokenizer.from_pretrained(tmp_path / "llama")("kalo")["input_ids"] == [1, *numbers("kalo")]


def test_weights_stored_in_16_bits_stay_so(tmp_path):
    folder = save(tmp_path / "own", torch_dtype="bfloat16")
    for shard in folder.glob("*.safetensors"):
        save_file({name: weight.bfloat16() for name, weight in load_file(shard).items()}, shard)
    assert main(["convert", "baichuan2", str(folder), str(tmp_path / "llama")]) == 0
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "llama", dtype="auto").dtype == torch.bfloat16


def without_weights(folder: Path) -> None:
    for path in folder.glob("model*"):
        path.unlink()


def pickled(folder: Path) -> None:
    without_weights(folder)
    (folder / "pytorch_model-00001-of-00002.bin").write_bytes(b"\x80")


def rewritten(name: str, content: bytes):
    return lambda folder: (folder / name).write_bytes(content)


def unreadable(name: str):
    """Makes a file one whose reading fails, also for root: a process's memory at address 0."""

    def apply(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to("/proc/self/mem")

    return apply


def changed_tensors(change):
    def apply(folder: Path) -> None:
        shard = folder / "model-00001-of-00002.safetensors"
        save_file(change(load_file(shard)), shard)

    return apply


def in_8_bits(found):
    return {name: tensor.char() for name, tensor in found.items()}


def told(**changes):
    def apply(folder: Path) -> None:
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        (folder / "tokenizer_config.json").write_text(json.dumps(settings | changes))

    return apply


def elsewhere(folder: Path) -> None:
    index = {"weight_map": {"lm_head.weight": "../own/model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("changes", "damage", "status", "line"),
    [
        ({"hidden_size": 5120}, None, 2, "has ALiBi instead of RoPE (the 13B model)"),
        ({"architectures": ["LlamaForCausalLM"]}, None, 2, "is of ['LlamaForCausalLM'], expected the plain weights"),
        ({"quantization_config": {"bits": 4}}, None, 2, "is quantised, expected the plain weights"),
        ({}, pickled, 2, "its weights are pickles (pytorch_model-00001-of-00002.bin), which are never opened here"),
        ({}, without_weights, 2, "it has no weights, expected model.safetensors"),
        ({}, elsewhere, 2, "has no file '../own/model-00001-of-00002.safetensors'"),
        ({}, rewritten("config.json", b"{"), 2, "config.json' is not valid JSON"),
        ({}, rewritten("config.json", b"[]"), 2, "config.json' holds a list, expected an object"),
        ({}, lambda folder: (folder / "tokenizer.model").unlink(), 2, "cannot read"),
        ({}, rewritten("tokenizer.model", b"\x0a\x7f"), 2, "is no SentencePiece model"),
        ({}, rewritten("tokenizer.model", sentencepiece(algorithm=1)), 2, "is no byte pair encoding"),
        ({}, rewritten("tokenizer.model", sentencepiece(characters=b"map")), 2, "or normalises characters"),
        ({}, rewritten("tokenizer.model", sentencepiece(prefix=1)), 2, "cannot be rebuilt together"),
        ({}, rewritten("model-00002-of-00002.safetensors", b"\x00" * 99), 2, "is damaged"),
        ({}, unreadable("model-00002-of-00002.safetensors"), 2, "model-00002-of-00002.safetensors' (No such device"),
        ({}, unreadable("generation_config.json"), 2, "cannot read '{own}/generation_config.json' (Input/output error); give the"),
        ({}, unreadable("config.json"), 2, "cannot read '{own}/config.json' (Input/output error); give the"),
        ({}, changed_tensors(lambda found: {**found, "more": torch.ones(2)}), 2, "the tensor more [2], expected no such tensor"),
        ({}, changed_tensors(lambda found: dict(list(found.items())[1:])), 2, "and 0 more tensors"),
        ({"intermediate_size": 97}, None, 2, "expected [256, 97]"),
        ({"num_hidden_layers": "two"}, None, 2, "num_hidden_layers is two; download it again"),
        ({"num_hidden_layers": 10**7}, None, 2, "num_hidden_layers = 10000000 in its config.json: must be"),
        ({"num_attention_heads": 3}, None, 2, "config.json' is not the configuration of a model"),
        ({"rms_norm_eps": "x"}, None, 2, "'rms_norm_eps' expected float"),
        ({"hidden_act": "foo"}, None, 2, "config.json' is not the configuration of a model"),
        ({"torch_dtype": "foo"}, None, 2, "config.json' is not the configuration of a model"),
        ({"pad_token_id": 10**9}, None, 2, "config.json' is not the configuration of a model"),
        ({}, rewritten("config.json", b"[" * 100000), 2, "config.json' is not valid JSON"),
        ({}, rewritten(INDEX, b'{"weight_map": {"a": 3}}'), 2, "does not name files of weights"),
        ({}, rewritten(INDEX, b'{"weight_map": {"a": ["b"]}}'), 2, "does not name files of weights"),
        ({}, changed_tensors(lambda found: {**found, "lm_head.weight": torch.ones(3)}), 2, "the tensor lm_head.weight [3]"),
        ({}, changed_tensors(lambda found: {**found, "a.W_pack.weight": torch.ones(())}), 2, "the tensor a.W_pack.weight []"),
        ({}, changed_tensors(in_8_bits), 2, "as torch.int8, expected plain weights"),
        ({}, told(bos_token=3), 2, "has the bos_token 3, expected a text"),
        ({}, told(bos_token={"other": 1}), 2, "has the bos_token {'other': 1}, expected a text"),
        ({}, told(bos_token="<nope>", add_bos_token=True), 2, "has the bos_token '<nope>', which"),
    ],
)  # fmt: skip
def test_what_is_refused_is_refused_in_one_line_and_leaves_nothing(tmp_path, capsys, changes, damage, status, line):
    save(tmp_path / "own", **changes)
    if damage:
        damage(tmp_path / "own")
    assert main(["convert", "baichuan2", str(tmp_path / "own"), str(tmp_path / "llama")]) == status
    error, line = capsys.readouterr().err.strip().splitlines(), line.replace("{own}", str(tmp_path / "own"))
    assert len(error) == 1 and error[0].startswith("calib: error: ") and line in error[0] and len(error[0]) < 400
    assert [path.name for path in tmp_path.iterdir()] == ["own"]


def test_a_13b_model_says_nothing_of_its_greatest_position(tmp_path, capsys):
    config = json.loads((save(tmp_path / "own") / "config.json").read_text())
    del config["max_position_embeddings"]
    (tmp_path / "own/config.json").write_text(json.dumps(config))
    assert main(["convert", "baichuan2", str(tmp_path / "own"), str(tmp_path / "llama")]) == 2
    assert "ALiBi" in capsys.readouterr().err


def test_requests_that_cannot_be(tmp_path, capsys, converted):
    before = sorted(path.stat().st_mtime_ns for path in converted.iterdir())
    for words, line in (
        (["baichuan2", str(converted.parent / "own"), str(converted)], "is there already and is not overwritten"),
        (["baichuan2", "nowhere", str(tmp_path / "x")], "'nowhere' is no folder; download the checkpoint first"),
        (["baichuan3", "a", "b"], "invalid choice: 'baichuan3'"),
        (["baichuan2", "a"], "the following arguments are required: OUTPUT"),
    ):
        assert main(["convert", *words]) == 2
        assert line in capsys.readouterr().err
    assert sorted(path.stat().st_mtime_ns for path in converted.iterdir()) == before
    (tmp_path / "file").write_text("")
    assert main(["convert", "baichuan2", str(converted.parent / "own"), str(tmp_path / "file/llama")]) == 1
    assert "cannot be written" in capsys.readouterr().err
