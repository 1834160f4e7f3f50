"""docs/add_a_method.md and docs/add_a_codec.md show the repository's files, word for word. (`test_snippets.py` runs them.)"""

import pytest
from documented import ROOT, text_of

FILES = [
    ("docs/add_a_method.md", "runtime/methods/tova.py"),
    ("docs/add_a_method.md", "configs/methods/tova.yaml"),
    ("docs/add_a_codec.md", "runtime/stages/codec/codebook.py"),
]
ROWS = [
    ("docs/add_a_method.md", "tests/support/cases.py", "tova"),
    ("docs/add_a_codec.md", "tests/support/codec_cases.py", "codebook-3"),
    ("docs/add_a_codec.md", "runtime/stages/codec/__init__.py", "codebook import"),
]


@pytest.mark.parametrize(("document", "file"), FILES)
def test_a_page_shows_a_file_as_it_is(document, file):
    assert (ROOT / file).read_text(encoding="utf-8") in text_of(document)


@pytest.mark.parametrize(("document", "file", "word"), ROWS)
def test_a_page_shows_a_row_as_it_is(document, file, word):
    rows = [line.strip() for line in (ROOT / file).read_text(encoding="utf-8").splitlines() if word in line]
    assert rows and all(row in text_of(document) for row in rows)
