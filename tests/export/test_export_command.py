"""`calib export`: the list of formats, and passing the other arguments to the format's own command."""

import sys
from types import SimpleNamespace

import pytest
from one_line import message

from calib.commands import export
from calib.errors import UsageError


def test_help_lists_the_formats(capsys):
    assert export.run(["--help"]) == 0
    text = capsys.readouterr().out
    for name, purpose in export.FORMATS.items():
        assert f"{name} " in text and purpose in text


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "--format is missing, expected one of onnx, artifact, compressed-tensors"),
        (["--artifact", "a"], "--format is missing"),
        (["--format", "gguf"], "--format gguf: unknown, expected one of onnx, artifact, compressed-tensors"),
        (["--form", "onnx"], "--format is missing"),
        (["--format"], "expected one argument; try `calib export --help`"),
    ],
)
def test_an_unknown_format(words, text):
    with pytest.raises(UsageError) as caught:
        export.run(words)
    assert text in message(caught)


@pytest.mark.parametrize("name", export.FORMATS)
def test_the_rest_goes_to_the_format(name, monkeypatch):
    given = []
    stand_in = SimpleNamespace(run=lambda rest: given.append(rest) or 7)
    monkeypatch.setitem(sys.modules, f"calib.export.{name.replace('-', '_')}.command", stand_in)
    assert export.run(["--model", "m", "--format", name, "--help", "-x"]) == 7
    assert given == [["--model", "m", "--help", "-x"]]


def test_a_format_s_help(capsys):
    with pytest.raises(SystemExit) as left:
        export.run(["--format", "compressed-tensors", "--help"])
    text = capsys.readouterr().out
    assert (
        left.value.code == 0 and "usage: calib export --format compressed-tensors" in text and "--granularity" in text
    )
