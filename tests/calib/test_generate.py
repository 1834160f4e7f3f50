"""`calib generate` and `calib methods`: what they print, and one line with status 2 for a wrong request."""

import io
import re
from importlib import resources
from pathlib import Path
from string import punctuation

import pytest
import yaml
from toy_language_model import save_toy, toy_tokenizer

from calib import cli
from calib.commands.generate import agreement
from calib.runtime.methods import METHODS, build

PROMPT = ["--prompt", "the quick brown fox jumps over the lazy dog " * 4, "--max-new-tokens", "5"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_toy(tmp_path_factory.mktemp("model")))


def test_both_continuations_and_both_memories_are_shown(model, capsys):
    assert cli.main(["generate", "--model", model, *PROMPT, "--method", "kivi", "--bits", "8", "--residual=32"]) == 0
    shown = capsys.readouterr().out
    full, ours = (line for line in shown.splitlines() if line.endswith(" bytes"))
    assert full.startswith("DynamicCache: ") and ours.startswith("kivi bits=8 residual=32: ")
    full_bytes, our_bytes = (int(line.split(": ")[1].split()[0].replace(",", "")) for line in (full, ours))
    # 3 layers, 2 streams, 2 heads of 32 float32 channels; the prompt and all new tokens but the last are in the cache.
    assert full_bytes % (3 * 2 * 2 * 32 * 4) == 0
    assert our_bytes < full_bytes
    assert "marginal bits" in shown


def test_the_full_method_agrees_with_the_full_cache(model, capsys):
    assert cli.main(["generate", "--model", model, *PROMPT, "--method", "full", "--sample", "--seed", "3"]) == 0
    assert "all 5 tokens agree" in capsys.readouterr().out


def test_special_probes_are_those_of_the_models_tokenizer(model, capsys, probed_ids):
    words = ["--method", "zipcache", "--probes", "special", "--recompress", "20"]
    assert cli.main(["generate", "--model", model, *PROMPT, *words]) == 0
    assert "zipcache probes=special recompress=20: " in capsys.readouterr().out
    assert probed_ids == {(0, 1, 2, *sorted(toy_tokenizer().convert_tokens_to_ids(list(punctuation))))}


def test_agreement_is_told_in_words():
    assert agreement([1, 2], [1, 2]) == "all 2 tokens agree"
    assert agreement([1, 2, 3], [1, 5, 3]).startswith("the first 1 of 3 tokens agree; after the first different token")
    assert agreement([1, 2, 3], [1, 2]).startswith("the first 2 of 3 tokens agree")
    assert agreement([1], [2]).startswith("none of 1 tokens agrees")


def test_the_embedded_model_is_said_to_answer_right(capsys):
    assert cli.main(["generate", "--method", "kivi", "--bits", "4", "--dtype", "float32"]) == 0
    shown = capsys.readouterr().out
    answer = shown.split("whose answer is ")[1].split()[0]
    assert f"the answer {answer}: right with DynamicCache, right with kivi" in shown
    assert re.search(r"all \d+ tokens agree", shown)  # the answer's own, and nothing behind it


def test_a_wrong_answer_is_told_as_one(model, capsys):
    assert cli.main(["generate", "--model", model, "--max-new-tokens", "2"]) == 0
    assert ": wrong with DynamicCache, wrong with kivi" in capsys.readouterr().out


def test_a_prompt_that_stays_in_the_window_is_no_failure(model, capsys):
    assert cli.main(["generate", "--model", model, "--prompt", "the fox", "--max-new-tokens", "3"]) == 0
    shown = capsys.readouterr().out
    assert "nothing is encoded yet" in shown and "% of" not in shown and "bits per value" not in shown


def test_a_prompt_may_come_from_stdin(model, capsys, monkeypatch):
    asked = ["generate", "--model", model, "--prompt-file", "-", "--max-new-tokens", "2"]
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"the quick fox"), encoding="ascii"))
    assert cli.main(asked) == 0
    assert "tokens, ends 'the quick fox'" in capsys.readouterr().out
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9"), encoding="ascii"))
    assert cli.main(asked) == 2
    assert "cannot read the prompt file '-': 'utf-8' codec" in capsys.readouterr().err


def test_the_help_says_that_no_chat_template_is_applied(capsys):
    with pytest.raises(SystemExit):
        cli.main(["generate", "--help"])
    assert "no chat template is applied" in " ".join(capsys.readouterr().out.split())


def test_without_a_prompt_there_is_a_question_to_answer(model, capsys):
    assert cli.main(["generate", "--model", model, "--method", "rtn", "--max-new-tokens", "1"]) == 0
    assert "40 lines to remember and a question whose answer is " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (
            ["--bit", "3"],
            "unknown option '--bit' (method 'kivi' has basis, bits, clip, corrections, group, key_bias, residual, statistics, "
            "tuned)",
        ),
        (["--bits"], "option '--bits' needs a value"),
        (["--bits", "9"], "bits must be a whole number 1 ... 8, got 9"),
        (["--group", "24"], "24"),
        (["--method", "kiwi"], "did you mean 'kivi'?"),
        (["--dtype", "int8"], "dtype='int8': one of float32, bfloat16, float16, auto"),
        (["--method", "nope.yaml"], "no configuration file 'nope.yaml'"),
        (
            ["--statistics", "calibrated"],
            "needs an artifact: pass artifact=Artifact.load(...), or --artifact FILE, from",
        ),
        (["--method", "klt"], "or --artifact FILE, from `calib fit`"),
        (["--artifact", "nope"], "artifact 'nope' is no file"),
        (["--prompt-file", "nope"], "cannot read the prompt file 'nope'"),
        (["--prompt", ""], "the prompt is empty"),
        (["--prompt", "caf\udce9"], "--prompt 'caf\\udce9': character 3 is not UTF-8"),
        (["--device", "nope"], "invalid value 'nope' for 'device' (such as cpu or cuda)"),
        (["--max-new-tokens", "0"], "--max-new-tokens must be at least 1, got 0"),
        (["--max-new-tokens", "x"], "invalid int value: 'x'"),
    ],
)
def test_wrong_requests(model, words, text, capsys):
    assert cli.main(["generate", "--model", model, *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("calib: error: ") and text in error and error.count("\n") == 1


def test_every_shipped_method_file_is_a_method():
    files = sorted(Path(str(resources.files("calib") / "configs" / "methods")).glob("*.yaml"))
    contents = [yaml.safe_load(file.read_text()) for file in files]
    assert {content["method"] for content in contents} == set(METHODS)
    for content in contents:
        build(content.pop("method"), content)


def test_a_method_file_is_found_in_the_package(model, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["generate", "--model", model, *PROMPT, "--method", "methods/rtn.yaml"]) == 0
    assert "rtn bits=4 statistics=prompt: " in capsys.readouterr().out


def test_methods_lists_every_method_with_its_options(capsys):
    assert cli.main(["methods"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in METHODS) and "residual=128" in shown
    assert cli.main(["methods", "kivi"]) == 0
    assert "2. Keys:" in capsys.readouterr().out
    assert cli.main(["methods", "kiwi"]) == 2
    assert "did you mean 'kivi'?" in capsys.readouterr().err
