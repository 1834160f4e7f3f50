"""Extraction of commands, blocks and snippets from a document: on a sample, and the least numbers from real documents."""

import pytest
from documented import block_commands, blocks, documents, inline_commands, snippets, text_of

SAMPLE = """\
# Title

    # first a comment
    calib fit --config a.yaml \\
        --output 'b c.safetensors'    # a comment
    unheard-of program

    methods:
      - {calib: x}

Text with `calib eval --config
FILE --only full`, `calib`, `kivi` and `make fit`.
    a lazy line of the paragraph

```
A=1 B=two calib generate --prompt "no # comment" && calib methods
```

```console
$ ./any.sh --flag
```

- in a list:

  ```yaml
  model: here
  ```

```python
calib fit --not --a --command
```

    .venv-x/bin/python -m mod arg
"""


def test_commands_of_a_sample():
    found = block_commands(SAMPLE, "doc.md")
    assert [(one.line, list(one.words), dict(one.environment)) for one in found] == [
        (4, ["calib", "fit", "--config", "a.yaml", "--output", "b c.safetensors"], {}),
        (6, ["unheard-of", "program"], {}),
        (16, ["calib", "generate", "--prompt", "no # comment"], {"A": "1", "B": "two"}),
        (16, ["calib", "methods"], {}),
        (20, ["./any.sh", "--flag"], {}),
        (33, [".venv-x/bin/python", "-m", "mod", "arg"], {}),
    ]
    assert found[0].values("--config", "--output") == ["a.yaml", "b c.safetensors"] and not found[0].values("--con")
    assert {one.document for one in found} == {"doc.md"}


def test_quoted_commands_of_a_sample():
    found = inline_commands(SAMPLE)
    assert [(one.line, list(one.words)) for one in found] == [
        (11, ["calib", "eval", "--config", "FILE", "--only", "full"]),
        (12, ["make", "fit"]),
    ]


def test_blocks_of_a_sample():
    found = [(block.language, block.line) for block in blocks(SAMPLE)]
    assert found == [
        ("indented", 3),
        ("indented", 8),
        ("", 16),
        ("console", 20),
        ("yaml", 26),
        ("python", 30),
        ("indented", 33),
    ]
    assert next(block for block in blocks(SAMPLE) if block.language == "yaml").text == "model: here\n"


@pytest.mark.parametrize(
    ("document", "least"), [("README.md", 6), ("docs/evaluate.md", 13), ("docs/models.md", 5), ("docs/engines.md", 4)]
)
def test_a_document_yields_its_commands(document, least):
    assert document in documents()
    assert len(block_commands(text_of(document), document)) >= least


def test_the_documents_yield_snippets_and_quotations():
    assert len(snippets("README.md", "python")) >= 2 and len(snippets("docs/hub.md", "python")) >= 2
    assert len(snippets("docs/evaluate.md", "yaml")) == 1
    assert len(inline_commands(text_of("README.md"))) >= 7
