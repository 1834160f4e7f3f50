"""A bench's page draws what `results.json` holds, also in a real browser, and shows all of its text as text."""

import re
import shutil
from itertools import pairwise

import pytest
from browser import PROGRAM, Browser
from page_reader import Reader
from toy_bench_run import BATCHES, CONTEXTS, NAMES, made_up

from calib.bench.curves import FRAME, LETTER, Dot, curves, spread
from calib.bench.page import markdown, page
from calib.bench.tables import tables

PHONE, DESK = 390, 1100


@pytest.fixture(scope="module")
def report():
    return Reader(page(made_up(), "calib bench --config toy.yaml"))


def test_a_line_for_every_row_in_every_drawing(report):
    drawings = report.of("svg", **{"class": "curves"})
    assert [found["aria-label"].split(" against")[0] for found in drawings] == [
        "tokens per second",
        "tokens per second",
        "memory of the cache",
        "memory of the cache",
    ]
    assert len(report.of("path", **{"class": "line"})) == 4 * len(
        NAMES
    )  # the baseline's second row shows the noise and has no line
    dots = [name for name, _ in report.elements].count("circle")
    assert dots == 2 * (len(NAMES) * len(BATCHES) * len(CONTEXTS) - 2)  # two rows failed
    assert len(report.of("path", **{"class": "whisker"})) == dots / 2  # bytes have no quartiles
    assert report.texts.count("full: 3906 tokens/s [3255, 4340] at 256 tokens") == 1
    assert [found["class"] for tag, found in report.elements if tag == "g" and found] == [
        f"own-{n}" for n in range(4)
    ] * 4


def test_the_legend_names_every_line_once(report):
    assert report.of("p", **{"class": "legend"})
    names = [text for text in report.texts if text in NAMES]
    assert [report.of("i", **{"class": f"kind-{look}"}) != [] for look in range(5)] == [True] * 4 + [False]
    assert names[: len(NAMES)] == NAMES


def test_tables_say_what_the_document_holds(report):
    found = {table.title: table for table in tables(made_up())}
    times = found["8 x 256 tokens"]
    over = "speed over full"
    assert times.header == ["method", "prefill ms", "first token ms", "tokens/s", f"prefill {over}", f"decode {over}"]
    assert times.rows[0] == ["full", "0.256", "0.256", "31250 [26042, 34722]", "", ""]
    assert times.rows[1][-1] == "0.500 [0.500, 2.000]" and times.rows[4][0] == "full again"
    sizes = found["Memory, 8 x 256 tokens"]
    assert sizes.header == [
        "method",
        "cache",
        "predicted cache",
        "bits per value",
        "peak of decode",
    ]  # no host, no other peak
    assert sizes.rows[1] == ["rtn-4", "4.00 MiB", "", "8.00", "1.00 MiB"] and len(sizes.rows) == len(NAMES)
    assert found["8 x 4096 tokens"].rows[1][:3] == ["rtn-4", "out of memory", ""]
    assert found["1 x 256 tokens"].rows[3][1] == "failed"
    largest = found["Largest batch in 1.00 GiB"]
    assert [line[2:5] for line in largest.rows] == [
        ["0", "cache alone, at most", ""],
        ["1", "cache alone, at most", ""],
        ["2", "peak", "3"],
        ["failed", "", ""],
    ]
    assert largest.rows[2][5:] == ["0 B", "2.00 MiB", "1.00 MiB"]
    noisy = made_up()
    noisy["largest"][2]["peak"]["fixed"] = -508 * 2**10
    assert tables(noisy)[-1].rows[2][5:] == ["about 0", "2.00 MiB", "1.00 MiB"]
    for table in found.values():
        assert all(len(line) == len(table.header) for line in table.rows)
        assert all(list(line) in report.rows for line in table.rows)
    assert ["command", "calib bench --config toy.yaml"] in report.rows
    said = "full, 256 tokens: not even a batch of 1 fits into 1.00 GiB; it takes 2.00 MiB, of which"
    assert any(text.startswith(said) for text in report.texts)
    assert sum("OutOfMemoryError: no room" in text for text in report.texts) == 1


def test_markdown_has_the_same_tables():
    text = markdown(made_up(), "calib bench --config toy.yaml")
    for table in tables(made_up()):
        assert f"## {table.title}\n\n| {' | '.join(table.header)} |\n|---|" in text
    assert r"| \<b>zip\</b>\|cache with a long name | failed |" in text
    assert "- rtn-4, 8 x 4096 tokens: out of memory: OutOfMemoryError: no room" in text
    assert "## Not measured" in text and "\n    calib bench --config toy.yaml\n" in text


def test_nothing_of_a_name_is_obeyed():
    text = page(made_up(), "<script>")
    assert "<b>" not in text and "<script" not in text and "&lt;b&gt;zip" in text


def test_a_single_context_and_figures_of_nothing():
    dot = Dot(256, 5.0, (4.0, 6.0), "one")
    text = "".join(curves({"one": [dot], "none": [Dot(256, 0.0, None, "")]}, {"one": 0, "none": 1}, "f", "t"))
    assert text.count("<circle") == 1 and "nan" not in text.lower() and ">none<" not in text
    assert list(curves({"none": []}, {"none": 0}, "f", "t")) == []
    dashed = "".join(curves({"ninth": [dot]}, {"ninth": 8}, "f", "t"))
    assert '<g class="own-0 dashed">' in dashed


def test_positions_are_logarithmic_and_higher_is_more():
    dots = [Dot(context, value, None, "") for context, value in ((256, 1.0), (1024, 4.0), (4096, 16.0))]
    text = "".join(curves({"one": dots}, {"one": 0}, "f", "t"))
    positions = [(float(x), float(y)) for x, y in re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)"', text)]
    (a, up_a), (b, up_b), (c, up_c) = positions
    assert b - a == pytest.approx(c - b, abs=0.2) and a > FRAME.left and c < FRAME.right
    assert up_a - up_b == pytest.approx(up_b - up_c, abs=0.2) and up_a > up_b > up_c > FRAME.top


def test_names_beside_the_lines_keep_their_order_and_their_distance():
    assert spread({"a": 100.0, "b": 50.0}, 0, 300) == {"a": 100.0, "b": 50.0}
    close = spread({"a": 300.0, "b": 299.0, "c": 298.0}, 0, 300)
    assert close == {"c": 300 - 2 * LETTER, "b": 300 - LETTER, "a": 300.0}
    many = spread({str(n): 7.0 for n in range(50)}, 0, 300)
    positions = sorted(many.values())
    assert positions[0] >= 0 and positions[-1] <= 300
    assert all(b - a == pytest.approx(300 / 49) for a, b in pairwise(positions))


@pytest.fixture(scope="module")
def browser():
    with Browser() as one:
        yield one


@pytest.mark.skipif(shutil.which(PROGRAM) is None, reason=f"needs {PROGRAM}, and there is none on the path")
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [PHONE, DESK])
def test_the_page_fits_and_asks_for_nothing(browser, tmp_path, width, dark):
    file = tmp_path / "report.html"
    file.write_text(page(made_up(), "calib bench --config " + "long/" * 60), encoding="utf-8")
    browser.requests.clear()
    browser.complaints.clear()
    browser.open(file, width, dark)
    assert browser.run("document.documentElement.scrollWidth") <= browser.run("innerWidth") == width
    assert browser.requests == [file.as_uri()] and browser.complaints == []
    outside = """[...document.querySelectorAll('.curves text')].filter((text) => {
      const [one, all] = [text.getBoundingClientRect(), text.closest('svg').getBoundingClientRect()];
      return one.left < all.left || one.right > all.right || one.top < all.top || one.bottom > all.bottom;
    }).length"""
    assert browser.run(outside) == 0
    strokes = (
        "[...document.querySelectorAll('.curves path.line')].slice(0, 4).map((one) => getComputedStyle(one).stroke)"
    )
    assert len(set(browser.run(strokes)) - {"none"}) == 4
    shade = browser.run("getComputedStyle(document.body).backgroundColor")
    assert shade == ("rgb(23, 23, 22)" if dark else "rgb(253, 253, 252)")
