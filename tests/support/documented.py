"""Extracts from the Markdown documents what a reader types: commands of code blocks and running text, code snippets."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("docs", "examples", "artifacts", "benchmarks", "kernels", "runtime", "calib", "configs")
SHELLS = ("sh", "bash", "shell", "console")
PROGRAMS = ("calib", "python", "python3", "pip", "make", "vllm", "hf", "wandb", "bash", "git", "torchrun", "accelerate")
ASSIGNMENT = re.compile(r"[A-Z][A-Z0-9_]*=\S*")
FENCE = re.compile(r"( {0,3})```+ *(\S*)")


@dataclass(frozen=True)
class Block:
    """A code block: between fences, of which the first names the `language`, or indented by four spaces ("indented").

    Attributes:
        line: number of the block's first line in the document, from 1.
        lines: the block's lines without the indentation.
    """

    language: str
    line: int
    lines: tuple[str, ...]

    @property
    def text(self) -> str:
        return "".join(f"{line}\n" for line in self.lines)


@dataclass(frozen=True)
class Command:
    """One command.

    Attributes:
        document: path of the document from the repository's root.
        line: line number in the document, from 1.
        words: the program and its arguments, without quotes and comments.
        environment: variables that are assigned before the program.
    """

    document: str
    line: int
    words: tuple[str, ...]
    environment: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        return shlex.join(self.words)

    def values(self, *options: str) -> list[str]:
        """The values of these options, in order: all words up to the next option, and the value in `--option=value`."""
        found: list[str] = []
        taking = False
        for word in self.words:
            name, equals, value = word.partition("=")
            if word.startswith("--"):
                taking = name in options
                found += [value] if taking and equals else []
            elif taking:
                found.append(word)
        return found


def documents() -> list[str]:
    """Paths from the root of every Markdown document of the repository."""
    found = [*ROOT.glob("*.md"), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.md"))]
    return sorted(str(path.relative_to(ROOT)) for path in found)


def text_of(document: str) -> str:
    return (ROOT / document).read_text(encoding="utf-8")


def blocks(text: str) -> Iterator[Block]:
    """The blocks of a document, in order; an empty line ends an indented one."""
    lines = [*text.splitlines(), ""]
    position = 0
    while position < len(lines):
        start = position
        fence = FENCE.match(lines[position])
        if fence:
            position += 1
            while position < len(lines) and not lines[position].strip().startswith("```"):
                position += 1
            body = [line.removeprefix(fence[1]) for line in lines[start + 1 : position]]
            yield Block(fence[2], start + 2, tuple(body))
        elif lines[position].startswith("    ") and not (start and lines[start - 1].strip()):
            while lines[position].startswith("    "):
                position += 1
            yield Block("indented", start + 1, tuple(line[4:] for line in lines[start:position]))
        position += 1


def block_commands(text: str, document: str = "") -> list[Command]:
    """The commands of code blocks in a shell's language, without a language, or indented.

    In a shell's block every line is a command; in the others too, if the first line that is no comment begins with a program.
    """
    found = []
    for block in blocks(text):
        if block.language not in (*SHELLS, "", "indented"):
            continue
        every = block.language in SHELLS or begins(next(line for line in [*block.lines, ""] if line[:1] != "#"))
        joined, first = "", 0
        for position, line in enumerate(block.lines):
            first = first if joined else block.line + position
            joined += line
            if joined.endswith("\\"):
                joined = joined[:-1]
                continue
            found += commands(joined, document, first, every)
            joined = ""
    return found


def commands(line: str, document: str, number: int, every: bool = False) -> Iterator[Command]:
    """The commands of one line, which may be joined by `&&`. A line that does not begin with a program has none, unless `every`."""
    line = line.strip().removeprefix("$ ")
    if not every and not begins(line):
        return
    words = shlex.split(line, comments=True)
    while words:
        end = words.index("&&") if "&&" in words else len(words)
        alone, words = words[:end], words[end + 1 :]
        given = []
        while alone and ASSIGNMENT.fullmatch(alone[0]):
            name, _, value = alone.pop(0).partition("=")
            given.append((name, value))
        if alone:
            yield Command(document, number, tuple(alone), tuple(given))


def begins(line: str) -> bool:
    """Whether a line begins with an assignment, one of PROGRAMS, or a path such as `.venv/bin/`."""
    first = (line.split() or [""])[0]
    return bool(first in PROGRAMS or ASSIGNMENT.fullmatch(first) or re.match(r"\.venv[\w-]*/bin/", first))


def inline_commands(text: str, document: str = "") -> list[Command]:
    """The commands in backquotes in running text; a quotation may span lines."""
    lines = text.splitlines()
    for block in blocks(text):
        lines[block.line - 1 : block.line - 1 + len(block.lines)] = [""] * len(block.lines)
    running, found = "\n".join(lines), []
    for quoted in re.finditer(r"(?<!`)`([^`]+)`(?!`)", running):
        line = running.count("\n", 0, quoted.start()) + 1
        if begins(quoted[1]) and len(quoted[1].split()) > 1:
            found += commands(quoted[1].replace("\n", " "), document, line)
    return found


def snippets(document: str, language: str) -> list[Block]:
    """The fenced blocks of a document in one language."""
    return [block for block in blocks(text_of(document)) if block.language == language]
