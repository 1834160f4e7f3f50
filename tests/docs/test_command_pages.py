"""docs/commands has one page per command, whose tables list the flags and defaults of the command's own parser."""

import contextlib
import io
import re
from dataclasses import fields
from functools import cache
from typing import Any

import pytest
from documented import ROOT, text_of

from calib import cli
from calib.arguments import Parser
from calib.bench.request import BenchRequest
from calib.evaluate.request import Request
from calib.export.artifact.command import part_of
from calib.runtime import Artifact
from calib.runtime.methods.klt import Klt

# Options that pages do not list: Lightning's, and groups that may be given as a file.
LIGHTNING = ("--trainer", "--checkpoint")
GROUPS = {"--model", "--data", "--model.dictionary", "--data.train", "--data.validation"}
ROW = re.compile(r"^\| `(--[\w.-]+)` \|(.*?)\| (.+) \|$", re.M)


def listed(command: str, section: str = "") -> dict[str, str]:
    """Flags in the tables of a page (or of one section) and their defaults, "" for none."""
    text = text_of(f"docs/commands/{command}.md")
    if section:
        text = text.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    found = [(flag, default.strip().strip("`")) for flag, default, meaning in ROW.findall(text) if meaning.strip()]
    assert len(found) == len(dict(found)) or not section
    return dict(found)


class Caught(Exception):
    """Carries a command's parser."""

    def __init__(self, parser: Parser) -> None:
        super().__init__()
        self.parser = parser


def of_parser(monkeypatch: pytest.MonkeyPatch, *words: str) -> dict[str, str]:
    """Flags and defaults of a command, from the parser that it builds; "" for no default and for a switch."""

    def catch(self: Parser, *_: Any) -> None:
        if words[0] != "export" or self.prog != "calib export":
            raise Caught(self)
        return known(self, *_)

    known = Parser.parse_known_args
    monkeypatch.setattr(Parser, "parse_known_args", catch)
    with pytest.raises(Caught) as caught:
        cli.command(words[0])([*words[1:]])
    actions = [action for action in caught.value.parser._actions if action.option_strings and action.dest != "help"]
    defaults = {action.option_strings[-1]: action.default for action in actions}
    return {
        flag: "" if default in (None, []) or default is False else str(default) for flag, default in defaults.items()
    }


@cache
def helped(command: str) -> dict[str, str]:
    """Flags and printed defaults in the help text of a Lightning command, "" for none."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        cli.main([command, "--help"])
    options = printed.getvalue().partition("\noptions:\n")[2].partition("\nLinked arguments:")
    found: dict[str, str] = {}
    for entry in re.split(r"\n(?=  -)", f"\n{options[0]}\n\n{options[2]}"):
        head, _, rest = entry.strip().partition("\n")
        flags = re.findall(r"(?<![\w.-])--[\w.]+", head)
        if flags and flags[0] not in found:
            default = re.search(r"default: (.*)\)$", " ".join(f"{head} {rest}".split("\n\n")[0].split()))
            found[flags[0]] = default[1] if default else ""
    return found


def test_every_command_has_a_page_and_a_row_of_the_index():
    pages = {path.stem for path in (ROOT / "docs/commands").glob("*.md")}
    assert pages == {*cli.COMMANDS, "README"}
    assert re.findall(r"\[`calib (\w+)`\]\(\1\.md\)", text_of("docs/commands/README.md")) == [*cli.COMMANDS]


@pytest.mark.parametrize("command", ["fit"])
def test_flags_and_defaults_of_a_lightning_command(command):
    wanted = {flag: default for flag, default in helped(command).items() if not flag.startswith(LIGHTNING)}
    assert len(wanted) > 25 and GROUPS & wanted.keys()
    wanted = {flag: default for flag, default in wanted.items() if flag not in GROUPS and flag != "--help"}
    assert listed(command) == wanted | ({"--output": "null"} if command == "fit" else {})


@pytest.mark.parametrize("command", ["inspect", "methods", "tune", "generate", "eval", "bench", "convert"])
def test_flags_and_defaults_of_a_command(command, monkeypatch):
    assert listed(command, "Options") == of_parser(monkeypatch, command)


@pytest.mark.parametrize("kind", ["onnx", "compressed-tensors"])
def test_flags_and_defaults_of_an_export(kind, monkeypatch):
    assert listed("export", kind) == of_parser(monkeypatch, "export", "--format", kind)


@pytest.mark.parametrize(("command", "request_class"), [("eval", Request), ("bench", BenchRequest)])
def test_keys_that_may_be_flags(command, request_class):
    keys = listed(command, "Keys of the configuration")
    defaults = {field.name: field.default for field in fields(request_class)}
    assert {flag.removeprefix("--") for flag in keys} <= {*request_class.known()}
    assert {f"--{name}" for name in defaults} - {"--name", "--methods", "--tasks"} <= keys.keys()
    for flag, default in keys.items():
        of_class = defaults[flag.removeprefix("--")]
        if default:
            assert default == str(of_class[0] if isinstance(of_class, tuple) else of_class), flag


def test_what_the_page_exports_for_klt_is_coded_as_with_the_whole_artifact():
    """The exported tensors suffice for the default coding of `klt`: without sizes it would silently code components only, which is
    less accurate."""
    whole = Artifact.load(ROOT / "artifacts/smollm2-135m.klt.calib.safetensors")
    row = re.search(r"^\| `klt` \| `([^`]+)`", text_of("docs/commands/export.md"), re.M)
    assert row
    part = part_of(whole, [word.strip("'") for word in row[1].split()])
    for options in ({"bits": 2.0}, {"loss": 0.05}):
        assert Klt(**options).coding(part) == Klt(**options).coding(whole)
