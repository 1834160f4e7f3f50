"""The documentation site: every page is in the menu, names of the API exist, and nothing is loaded from another host."""

import importlib
import re
import tomllib
from importlib.util import module_from_spec, spec_from_file_location
from types import ModuleType

import pytest
import yaml
from documented import ROOT, text_of

SITE = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
NAME = re.compile(
    r"^::: (\S+)$(?:\n    options:\n(?:      merge_init_into_class: false\n)?      members: \[(.+)\])?", re.M
)
NAMES = [
    (found[1], found[2] or "")
    for path in sorted((ROOT / "docs/api").glob("*.md"))
    for found in NAME.finditer(path.read_text())
]


@pytest.fixture(scope="module")
def check() -> ModuleType:
    """The module docs/site_check.py, which checks the built site."""
    spec = spec_from_file_location("site_check", ROOT / "docs/site_check.py")
    assert spec and spec.loader
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def pages(entry: object) -> list[str]:
    """Paths of a menu entry and its children, in order."""
    if isinstance(entry, str):
        return [entry]
    children = entry.values() if isinstance(entry, dict) else entry
    return [path for child in children for path in pages(child)]


def test_the_menu_has_every_page_once():
    menu = pages(SITE["nav"])
    assert sorted(menu) == sorted(str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md"))


def test_no_font_and_no_plugin_asks_another_host():
    assert SITE["theme"]["font"] is False
    plugins = [name if isinstance(name, str) else next(iter(name)) for name in SITE["plugins"]]
    assert plugins == ["search", "mkdocstrings"]
    assert not [line for line in text_of("mkdocs.yml").splitlines() if "http" in line]


def test_a_strict_build_looks_at_links_and_the_menu():
    assert {*SITE["validation"].values()} == {"warn"} and len(SITE["validation"]) == 4
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert "mkdocs build --strict" in makefile
    assert re.search(r"^make .*\bdocs$", (ROOT / ".ci/run").read_text(encoding="utf-8"), re.M)


@pytest.mark.parametrize(
    ("text", "suffix", "found"),
    [
        ('<script src="https://a.example/x.js"></script>', ".html", ["https://a.example/x.js"]),
        ('<link href="//a.example/x.css" rel="stylesheet">', ".html", ["//a.example/x.css"]),
        ('<img alt="" src="http://a.example/x.png">', ".html", ["http://a.example/x.png"]),
        ("<style>@import url('https://a.example/x.css');</style>", ".html", ["https://a.example/x.css"]),
        ('<p style="background: url(https://a.example/x.png)">', ".html", ["https://a.example/x.png"]),
        ('<pre class="mermaid"><code>a --> b</code></pre>', ".html", ["mermaid"]),
        ("a{src:url(https://a.example/x.woff2)}", ".css", ["https://a.example/x.woff2"]),
        ('<a href="https://a.example">a link</a><link rel="canonical" href="https://a.example">', ".html", []),
        ('<img src="images/x.svg"><script src="x.js">var a = "https://a.example"</script>', ".html", []),
        ("a{src:url(data:image/svg+xml;charset=utf-8,x)}", ".css", []),
    ],
)
def test_what_a_page_takes_from_another_host_is_found(check, text, suffix, found):
    assert check.fetched_elsewhere(text, suffix) == found


@pytest.mark.parametrize(("name", "members"), NAMES)
def test_a_name_of_the_api_exists_and_says_what_it_is(name, members):
    module, _, own = name.rpartition(".")
    found = getattr(importlib.import_module(module), own)
    assert found.__doc__
    for member in filter(None, members.split(", ")):
        assert getattr(found, member).__doc__, member


def test_the_api_has_what_the_runtime_exports():
    import calib.runtime
    from calib.runtime.methods import METHODS

    shown = {name.rpartition(".")[2] for name, _ in NAMES}
    assert {*calib.runtime.__all__} <= shown and {method.__name__ for method in METHODS.values()} <= shown
    assert {"CompressedCache", "Corrections", "Codec", "Method"} <= shown


def ranges() -> dict[str, str]:
    """The releases that pyproject.toml allows, in the wording of docs/support.md, by package."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = [line for lines in project["optional-dependencies"].values() for line in lines]
    found = {"Python": written(project["requires-python"])}
    for line in [*project["dependencies"], *extras]:
        name, bounds = re.match(r"([\w-]+)(?:\[[^\]]*\])?([^;]*)", line).groups()
        if bounds:
            found[name] = written(bounds)
    return found


def written(bounds: str) -> str:
    """`>=2.11,<2.14` as "2.11 to 2.13", `>=2.6,<2.7` as "2.6", `>=4` as "4 and newer"."""
    low, _, below = bounds.replace(" ", "").removeprefix(">=").partition(",<")
    if not below:
        return f"{low} and newer"
    major, _, minor = below.partition(".")
    if not minor or low.count(".") > 1:
        return f"{low} and newer, below {below}"
    last = f"{major}.{int(minor) - 1}"
    return low if last == low else f"{low} to {last}"


def test_supported_releases_are_those_that_can_be_installed():
    table = dict(re.findall(r"^\| ([\w-]+) \| (\d[^|]*) \|[^|]*\|$", text_of("docs/support.md"), re.M))
    known = ranges()
    assert table == {name: known[name] for name in table}
    required = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    assert {"Python", *(re.match(r"[\w-]+", line)[0] for line in required)} <= table.keys() and len(table) > 10


def test_the_readme_says_the_same_releases():
    readme, known = text_of("README.md"), ranges()
    assert f"| transformers | {known['transformers']}" in readme
    versions = ", ".join(known[name] for name in ("torch", "triton"))
    assert f"| torch, Triton, Python | {versions}, {known['Python']} |" in readme
