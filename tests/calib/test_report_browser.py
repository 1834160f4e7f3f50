"""`report.html` in a real browser: it fetches nothing, causes no error, fits a phone, and its headings sort."""

import shutil
from pathlib import Path

import pytest
from browser import PROGRAM, Browser
from toy_run import toy_run

from calib.evaluate.page.page import page
from calib.evaluate.run_file import read_run

pytestmark = pytest.mark.skipif(shutil.which(PROGRAM) is None, reason=f"needs {PROGRAM}, and there is none on the path")
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
PHONE, DESK = 390, 1100
NAMES = "[...document.querySelectorAll('table.sorted tbody tr')].map((row) => row.cells[0].textContent)"
PRESS = "document.querySelectorAll('table.sorted th button')[{}].click()"
CONTRAST = """(() => {
  const brush = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
  const light = (colour) => {
    brush.clearRect(0, 0, 1, 1);
    brush.fillStyle = colour;
    brush.fillRect(0, 0, 1, 1);
    const parts = [...brush.getImageData(0, 0, 1, 1).data].slice(0, 3).map((part) => part / 255);
    const [r, g, b] = parts.map((part) => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (element) => {
    const colour = getComputedStyle(element).backgroundColor;
    return colour === 'rgba(0, 0, 0, 0)' ? behind(element.parentElement) : colour;
  };
  const ratio = (one, other) => (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05);
  return Math.min(...[...document.querySelectorAll('td, th, p, li, h1, h2, h3, .label, small, code')].map((element) =>
    ratio(light(getComputedStyle(element).color), light(behind(element)))));
})()"""


@pytest.fixture(scope="module")
def browser():
    with Browser() as one:
        yield one


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A small run with everything there can be, and the largest of the published ones."""
    folder = tmp_path_factory.mktemp("pages")
    run = toy_run()
    run["cells"][-1]["error"] = "RunError: " + "x" * 300
    for name, content in (("toy", run), ("large", read_run(str(RESULTS / "gear.json")))):
        (folder / f"{name}.html").write_text(page(content, "calib eval --config " + "long/" * 60), encoding="utf-8")
    return folder


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [PHONE, DESK])
@pytest.mark.parametrize("name", ["toy", "large"])
def test_the_page_fits_and_asks_for_nothing(browser, files, name, width, dark):
    browser.requests.clear()
    browser.complaints.clear()
    file = files / f"{name}.html"
    browser.open(file, width, dark)
    browser.run("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    assert browser.run("document.documentElement.scrollWidth") <= browser.run("innerWidth") == width
    assert browser.run("[...document.querySelectorAll('.scroll')].every((box) => box.clientWidth <= innerWidth)")
    assert browser.requests == [file.as_uri()]
    assert browser.complaints == []
    shade = browser.run("getComputedStyle(document.body).backgroundColor")
    assert shade == ("rgb(23, 23, 22)" if dark else "rgb(253, 253, 252)")
    assert browser.run(CONTRAST) >= 4.5  # WCAG 2, level AA


def test_headings_sort_the_table_and_give_it_back(browser, files):
    browser.open(files / "toy.html", DESK)
    asked = ["Reference", "full", "Low bits", "rtn-4", "rtn-2", "worse"]
    assert browser.run(NAMES) == asked
    browser.run(PRESS.format(3))  # bits: by size, not by letters
    assert browser.run(NAMES) == ["rtn-2", "rtn-4", "worse", "full"]
    assert browser.run("document.querySelectorAll('[aria-sort]').length") == 1
    browser.run(PRESS.format(3))
    assert browser.run(NAMES) == ["full", "worse", "rtn-4", "rtn-2"]
    browser.run(PRESS.format(3))
    assert browser.run(NAMES) == asked and not browser.run("document.querySelectorAll('[aria-sort]').length")
    for order in (["full", "rtn-4", "rtn-2"], ["rtn-2", "rtn-4", "full"]):
        browser.run(PRESS.format(5))
        assert browser.run(NAMES) == [*order, "worse"]  # what failed is last in either order
    browser.run(PRESS.format(0))
    assert browser.run(NAMES) == ["full", "rtn-2", "rtn-4", "worse"]


def test_names_in_the_drawing_stay_inside_of_it(browser, files):
    browser.open(files / "large.html", DESK)
    outside = """[...document.querySelectorAll('.scatter g text')].filter((text) => {
      const [one, all] = [text.getBoundingClientRect(), text.closest('svg').getBoundingClientRect()];
      return one.left < all.left || one.right > all.right || one.top < all.top || one.bottom > all.bottom;
    }).length"""
    assert browser.run(outside) == 0
    assert browser.run("document.querySelectorAll('.scatter g.best text').length") > 4


def test_a_script_of_the_run_itself_is_refused(browser, tmp_path):
    text = page(toy_run(), "").replace("<h1>", "<script>document.title = 'taken'</script><h1>", 1)
    (tmp_path / "bad.html").write_text(text, encoding="utf-8")
    browser.complaints.clear()
    browser.open(tmp_path / "bad.html", DESK)
    assert browser.run("document.title") == "calib eval: toy"
    assert any("Content Security Policy" in complaint for complaint in browser.complaints)
