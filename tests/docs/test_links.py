"""Links of the documents have a target: on GitHub in any document, and in the documentation site for those below docs/."""

import re
from pathlib import Path

import pytest
from documented import ROOT, blocks, documents, text_of

LINK = re.compile(r"!?\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^()\s]+)\)")
ELSEWHERE = re.compile(r"[a-z]+:")


def prose(document: str) -> list[str]:
    """Lines of a document, with empty lines for those of code blocks."""
    lines = text_of(document).splitlines()
    for block in blocks(text_of(document)):
        lines[block.line - 1 : block.line - 1 + len(block.lines)] = [""] * len(block.lines)
    return lines


def links(document: str) -> list[str]:
    return [link for link in LINK.findall("\n".join(prose(document))) if not ELSEWHERE.match(link)]


def anchors(document: str) -> set[str]:
    """Anchors of a document's headings, as GitHub and the site build them."""
    headings = [line.lstrip("#") for line in prose(document) if re.match(r"#{1,6} ", line)]
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


LINKS = [(name, link) for name in documents() for link in links(name)]


@pytest.mark.parametrize(("document", "link"), LINKS)
def test_a_link_leads_to_a_file_and_a_heading(document, link):
    path, _, anchor = link.partition("#")
    target = (ROOT / document).parent / path if path else ROOT / document
    assert target.exists(), f"{document}: no {link}"
    if anchor:
        assert anchor in anchors(str(target.resolve().relative_to(ROOT))), f"{document}: no heading {link}"
    if Path(document).parts[0] == "docs":  # a page of the site
        assert target.is_file() and target.resolve().is_relative_to(ROOT / "docs"), f"{document}: {link} is no page"


def test_a_page_has_one_title():
    """Two titles would be two pages in one file, or a page twice."""
    titles = {name: [line for line in prose(name) if line.startswith("# ")] for name in documents()}
    assert {name: found for name, found in titles.items() if len(found) > 1} == {}


def test_there_are_links():
    assert len(LINKS) > 100 and {"README.md", "docs/README.md"} <= {name for name, _ in LINKS}
    assert "on-your-own-model" in anchors("docs/how_to_choose.md")
