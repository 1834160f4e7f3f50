"""Hostile YAML, in files and on the command line, for every command that reads YAML: one line and status 2, without delay."""

import time
from itertools import pairwise
from pathlib import Path

import pytest

from calib.cli import LINE, main
from calib.yaml_input import DEPTH, NODES, RefusedYamlError, load_yaml


def bomb(key: str, levels: int = 40) -> str:
    """A list of nine lists of nine lists and so on: 9 ** `levels` values in `levels` lines."""
    lines = ["x0: &x0 [a]"]
    lines += [f"x{n}: &x{n} [{', '.join([f'*x{n - 1}'] * 9)}]" for n in range(1, levels)]
    return "\n".join([*lines, f"{key}: *x{levels - 1}\n"])


def merges(levels: int = 40) -> str:
    """The same with mappings that are merged into each other."""
    lines = ["x0: &x0 {a: 1}"]
    lines += [f"x{n}: &x{n} {{'<<': [{', '.join([f'*x{n - 1}'] * 9)}], k{n}: 1}}" for n in range(1, levels)]
    return "\n".join([*lines, ""])


HOSTILE = {
    "bomb": (bomb("model"), f"expands to more than {NODES} values"),
    "merges": (merges(), f"expands to more than {NODES} values"),
    "deep": ("model: " + "[" * 100_000, f"is nested deeper than {DEPTH} levels"),
    "closed": ("model: " + "[" * 60 + "]" * 60, f"is nested deeper than {DEPTH} levels"),
    "chain": (
        "\n".join(["a0: &a0 [1]", *(f"a{n}: &a{n} [*a{n - 1}]" for n in range(1, 60))]),
        f"is nested deeper than {DEPTH} levels",
    ),
    "cycle": ("model: &a [*a]", "lies within itself"),
    "tag": ("model: !!python/object/apply:os.system [true]", "is not valid YAML, line 1: could not determine"),
    "own tag": ("model: !reward 3", "is not valid YAML, line 1: could not determine"),
    "date": ("model: 2020-13-45", "is not valid YAML: month must be in 1..12"),
    "digits": ("model: " + "9" * 5000, "is not valid YAML: Exceeds the limit"),
    "control": ("model: \x1b[31m", "is not valid YAML"),
    "latin": (b"model: \xff\xfe", "not UTF-8 text"),
    "large": ("model: " + "x" * 1_000_001, "is larger than 1000000 bytes"),
    "unfinished": ("model: [1", "is not valid YAML, line 1"),
}
COMMANDS = {
    "fit": ["fit", "--output=x.safetensors", "--config=hostile.yaml"],
    "eval": ["eval", "--config", "hostile.yaml"],
    "bench": ["bench", "--config", "hostile.yaml"],
    "generate": ["generate", "--method", "hostile.yaml"],
    "tune": ["tune", "--method", "hostile.yaml", "--bits", "2", "--artifact", "x.safetensors"],
}


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def refused(capsys, words: list[str]) -> str:
    """Run a command; assert status 2, one short line, within 20 seconds, and no new file; return the line."""
    before, begin = sorted(Path.cwd().iterdir()), time.monotonic()
    capsys.readouterr()
    assert main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith("calib: error: ") and error.count("\n") == 1
    assert len(error) < LINE + 50 and error.rstrip("\n").isprintable()
    assert time.monotonic() - begin < 20
    assert sorted(Path.cwd().iterdir()) == before
    return error


@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.parametrize("command", COMMANDS)
def test_files(command, kind, capsys):
    content, said = HOSTILE[kind]
    Path("hostile.yaml").write_bytes(content if isinstance(content, bytes) else content.encode())
    assert said in refused(capsys, COMMANDS[command])


@pytest.mark.parametrize("command", COMMANDS)
def test_wrong_kinds_of_files(command, capsys):
    """A file with a list, an empty one, one with a number; a missing file; a folder."""
    for content in ("- 1\n- 2\n", "", "7"):
        Path("hostile.yaml").write_text(content)
        refused(capsys, COMMANDS[command])
    Path("hostile.yaml").unlink()
    refused(capsys, COMMANDS[command])
    Path("hostile.yaml").mkdir()
    refused(capsys, COMMANDS[command])


@pytest.mark.parametrize(
    "words",
    [
        ["generate", "--method=kivi", "--bits"], ["tune", "--method=kivi", "--bits=2", "--artifact=x", "--group"],
        ["eval", "--config=eval/quick.yaml", "--limit"], ["bench", "--methods=full", "--turns"],
        ["fit", "--output=x.safetensors", "--model.path=x", "--model.bits"],
    ],
    ids=lambda words: words[0],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["bomb", "deep", "tag", "unfinished", "cycle"])
def test_values_on_the_command_line(words, kind, capsys):
    levels = [f"&{n} [{', '.join([f'*{p}'] * 9)}]" for p, n in pairwise("abcdefghi")]
    value = {
        "bomb": f"[&a [1,1,1,1,1,1,1,1,1], {', '.join(levels)}]",
        "deep": "[" * 5000,
        "tag": "!!python/object/apply:os.system [true]",
        "unfinished": "[1",
        "cycle": "&a [*a]",
    }[kind]
    refused(capsys, [*words, value])


def test_a_file_named_within_a_file(capsys):
    """The parser of `calib fit` reads a file that a configuration names; it is checked, too."""
    Path("model.yaml").write_text(bomb("path"))
    Path("fit.yaml").write_text("model: model.yaml\noutput: x.safetensors\n")
    refused(capsys, ["fit", "--config", "fit.yaml"])


@pytest.mark.full
def test_what_is_plain_is_read_as_ever():
    text = "a: &a [1, 2.5, x]\nb: {<<: {c: 1}, d: *a}\ne: null\nf: 1e3\n"
    assert load_yaml(text) == {"a": [1, 2.5, "x"], "b": {"c": 1, "d": [1, 2.5, "x"]}, "e": None, "f": "1e3"}
    assert load_yaml("") is None
    assert len(load_yaml(f"[{', '.join(['1'] * (NODES - 1))}]")) == NODES - 1
    with pytest.raises(RefusedYamlError, match="more than"):
        load_yaml(f"[{', '.join(['1'] * NODES)}]")
