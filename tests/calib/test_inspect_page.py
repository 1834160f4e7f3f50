"""`calib inspect --html`: the page has the tables, draws what the artifact holds, and fetches nothing."""

import math
import os
import re
from html.parser import HTMLParser

import pytest
import torch
from toy_artifact import TOY_FIGURES, toy_artifact, toy_model, toy_tensors

from calib.cli import main


@pytest.fixture
def path(tmp_path):
    toy_artifact().save(tmp_path / "toy.calib.safetensors")
    return tmp_path / "toy.calib.safetensors"


class Reader(HTMLParser):
    """What a browser finds on a page: texts, elements with their attributes, and that every element is closed."""

    VOID = {"meta", "br", "hr", "img", "link", "input"}

    def __init__(self, page: str) -> None:
        super().__init__()
        self.texts, self.elements, self.open, self.rows = [], [], [], []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag not in self.VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data

    def of(self, tag, **attributes):
        return [found for name, found in self.elements if name == tag and attributes.items() <= found.items()]


def page_of(path, capsys) -> Reader:
    output = path.parent / "page.html"
    assert main(["inspect", str(path), "--html", str(output)]) == 0
    assert capsys.readouterr().out == f"wrote {output}\n"
    return Reader(output.read_text(encoding="utf-8"))


@pytest.fixture
def page(tmp_path, capsys):
    provenance = {"seed": 7, "metrics": {"layers": [{"layer": 0, "tail": 1.5}], "dictionaries": TOY_FIGURES}}
    toy_artifact(provenance=provenance).save(tmp_path / "toy.calib.safetensors")
    return page_of(tmp_path / "toy.calib.safetensors", capsys)


def test_the_page_has_every_table(page):
    for name, tensor in toy_tensors().items():
        (row,) = (row for row in page.rows if row[0] == name)
        assert row[1] == str(list(tensor.shape))
        assert row[4] == f"{tensor.max().item():.4g}"
    for row in (
        ["seed", "7"],
        ["layer", "tail"],
        ["0", "1.5"],
        ["keys.1", "1", "16", "8", "0.4", "0.3", "2", "0"],
        ["values.0", "0-1", "16", "4", "0.25", "0", "3", "1"],
    ):
        assert row in page.rows
    assert any(text.startswith("llama, 2 layers") for _, text in (row for row in page.rows if len(row) == 2))


def test_the_page_draws_divergences_with_the_groups_framed(page):
    maps = page.of("svg")
    assert [one["aria-label"] for one in maps] == [
        *(f"Divergence of the {stream} of each pair of layers" for stream in ("keys", "values")),
        "Bits of the components of each layer at 2 bits a value",
    ]
    frames = page.of("rect", **{"class": "group"})
    cells = [one for one in page.of("rect") if "class" not in one]
    assert len(cells) == 2 * 4
    side = int(cells[0]["width"]) + 1
    assert [int(frame["width"]) for frame in frames] == [side, side, 2 * side]  # two groups of keys, one of values
    assert [frame["x"] for frame in frames] == [frame["y"] for frame in frames]
    assert float(frames[1]["x"]) - float(frames[0]["x"]) == side
    tensors = toy_tensors()
    for number, stream in enumerate(("keys", "values")):
        share = tensors[f"{stream}.divergence"] / math.log(2)
        shown = [float(one["fill-opacity"]) for one in cells[4 * number : 4 * number + 4]]
        assert shown == pytest.approx(share.flatten().tolist(), abs=6e-4)
        assert f"layers 0 and 1: {tensors[f'{stream}.divergence'][0, 1]:.4f}" in page.texts


def test_the_page_draws_the_bits_of_components(page):
    """2 layers, keys and values, 8 components: the mean is the budget's 2 bits, and bits never rise from one to the next."""
    cells = [one for one in page.of("rect") if one.get("class") == "bits"]
    shares = torch.tensor([float(one["fill-opacity"]) for one in cells]).view(2, 2, 8)
    assert float(8 * shares.mean()) == pytest.approx(2, abs=0.05)
    assert bool((shares.diff(dim=-1) <= 1e-6).all())


def test_the_page_draws_losses_on_one_scale(tmp_path, page):
    widths = [(one["class"], float(one["style"].removeprefix("width:").removesuffix("%"))) for one in page.of("i")]
    assert widths == [
        ("initial_loss", 50.0), ("loss", 25.0),
        ("initial_loss", 100.0), ("loss", 75.0),
        ("initial_loss", 62.5), ("loss", 0.0),
    ]  # fmt: skip
    text = (tmp_path / "page.html").read_text()
    assert re.findall(r'class="loss">([^<]*)<', text) == ["0.2000", "0.1000", "0.4000", "0.3000", "0.2500", "0.0000"]


def test_the_page_is_alone_and_for_any_screen(tmp_path, page):
    text = (tmp_path / "page.html").read_text()
    assert not {"script", "link", "img", "iframe", "object", "base", "form"} & {tag for tag, _ in page.elements}
    assert not any({"src", "href", "onload", "onclick"} & attributes.keys() for _, attributes in page.elements)
    assert "url(" not in text
    assert "@import" not in text
    assert "://" not in text
    assert page.of("meta", **{"http-equiv": "Content-Security-Policy"})[0]["content"].startswith("default-src 'none'")
    assert page.of("meta", name="viewport", content="width=device-width, initial-scale=1")
    assert "prefers-color-scheme: dark" in text


def test_nothing_of_the_file_is_obeyed_by_a_browser(tmp_path, capsys):
    bad = "</td><script>alert(1)</script><b onclick='x' title=\"y\">&amp;\x00\u202e"
    provenance = {
        bad: bad,
        "metrics": {"layers": [{"layer": 0, bad: 1.0}], "dictionaries": [{**TOY_FIGURES[0], bad: 1}]},
    }
    name = "a<i>b&c.safetensors"
    visible = bad.removesuffix("\x00\u202e")  # no tensor can be called otherwise
    toy_artifact(provenance=provenance, tensors={visible: torch.ones(2), **toy_tensors()}).save(tmp_path / name)
    page = page_of(tmp_path / name, capsys)
    assert not page.of("script")
    assert not page.of("b")
    shown = bad.replace("\x00", "?").replace("\u202e", "?")
    assert [shown, shown] in page.rows
    assert ["layer", shown] in page.rows
    assert any(row[:2] == [visible, "[2]"] for row in page.rows)
    assert name in page.texts


@pytest.mark.parametrize("layers", [1, 13, 90])
def test_maps_of_any_number_of_layers(tmp_path, capsys, layers):
    model = toy_model(num_hidden_layers=layers)
    tensors = {
        "keys.divergence": torch.full((layers, layers), math.log(2)).fill_diagonal_(0),
        "keys.layer_groups": torch.arange(layers) // 3,
    }
    toy_artifact(model, tensors=tensors, provenance={}).save(tmp_path / "a")
    page = page_of(tmp_path / "a", capsys)
    (one,) = page.of("svg")
    size = float(one["viewbox"].split()[2])
    for cell in page.of("rect"):
        assert 0 <= float(cell["x"]) < float(cell["x"]) + float(cell["width"]) < size
    assert len(page.of("rect", **{"class": "group"})) == -(-layers // 3)
    assert len(page.of("text", **{"class": "axis"})) <= 2 * 16


def test_an_artifact_without_groups_has_a_page_without_drawings(tmp_path, capsys):
    toy_artifact(tensors={"later": torch.zeros(0, 3)}, provenance={"metrics": [1]}).save(tmp_path / "a")
    page = page_of(tmp_path / "a", capsys)
    assert not page.of("svg")
    assert not page.of("i")
    assert ["later", "[0, 3]", "-", "-", "-"] in page.rows


def test_a_page_is_replaced_whole_or_not_at_all(path, capsys, monkeypatch):
    output = path.parent / "page.html"
    output.write_text("the old one")

    def fail(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fail)
        assert main(["inspect", str(path), "--html", str(output)]) == 1
    error = capsys.readouterr().err
    assert error == f"calib: error: {output}: cannot be written (No space left on device); choose another folder\n"
    assert output.read_text() == "the old one"
    assert main(["inspect", str(path), "--html", str(output)]) == 0
    assert output.read_text().startswith("<!doctype html>")
    assert sorted(path.parent.iterdir()) == [output, path]


@pytest.mark.parametrize("name", ["a.html", "missing/../a.html"])
def test_the_page_never_replaces_the_artifact(path, capsys, name):
    (path.parent / "a.html").symlink_to(path)
    before = path.read_bytes()
    assert main(["inspect", str(path), "--html", str(path.parent / name)]) == 2
    assert "is the artifact itself; name another file" in capsys.readouterr().err
    assert path.read_bytes() == before


@pytest.mark.parametrize("loss", [1e308, 10**400, True, "0.1", None])
def test_figures_that_cannot_be_drawn_are_left_out(tmp_path, capsys, loss):
    figures = [TOY_FIGURES[0] | {"initial_loss": loss}, TOY_FIGURES[1]]
    toy_artifact(provenance={"metrics": {"dictionaries": figures}}).save(tmp_path / "a")
    page = page_of(tmp_path / "a", capsys)
    assert [one["style"] for one in page.of("i")] == ["width:100.0%", "width:75.0%"]
    assert ["keys.0", "0", "16", "8", "-", "-", "-", "-"] in page.rows
