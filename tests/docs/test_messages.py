"""Messages that docs/troubleshooting.md quotes are in the code, word for word except for inserted values (`…`)."""

import ast

from documented import ROOT, snippets

PAGE = "docs/troubleshooting.md"
FILLED = "…"


def templates() -> set[str]:
    """All string literals of the code, with `…` for each inserted value and white space as one space."""
    found = set()
    for folder in ("calib", "runtime", "kernels"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.JoinedStr):
                    parts = [part.value if isinstance(part, ast.Constant) else FILLED for part in node.values]
                    found.add(one_space("".join(map(str, parts))))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.add(one_space(node.value))
    return found


def one_space(text: str) -> str:
    return " ".join(text.split())


def test_every_quoted_message_is_in_the_code():
    every = templates()
    quoted = [one_space(line) for block in snippets(PAGE, "text") for line in block.lines if line.strip()]
    assert not [line for line in quoted if line not in every]
    assert len(quoted) >= 30 and len(quoted) == len({*quoted})
