"""`report.html` shows and draws what `results.json` holds, and shows all of its text as text."""

import base64
import hashlib
import itertools
import json
import random
import re
from pathlib import Path

import pytest
from page_reader import Reader
from toy_run import toy_run

from calib.evaluate.figures import interval, less_is_better, maps, number, scalars
from calib.evaluate.page.axes import axis_of, bits_axis, bits_ticks
from calib.evaluate.page.labels import Box, place
from calib.evaluate.page.memory_bars import COLOURS
from calib.evaluate.page.page import page
from calib.evaluate.page.pareto import front
from calib.evaluate.run_file import read_run

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


@pytest.fixture(scope="module")
def report():
    return Reader(page(toy_run(), "calib eval --config toy.yaml"))


def test_names_tell_what_figures_are():
    figures = {"kl": 0.5, "agreement": 0.75, "low": 0.5, "high": 1.0, "kl_low": 0.25, "kl_high": 1.0, "tokens": 9}
    figures |= {f"error at layer {layer}": layer / 8 for layer in (10, 2)} | {
        "low at layer 2": 0.0,
        "low at layer 3": 0.0,
    }
    assert scalars([figures]) == ["agreement", "kl"]
    assert scalars([{"kept": 1.0}, {"distance": 2.0, "kept": 0.5}]) == ["distance", "kept"]
    assert interval(figures, "agreement") == (0.5, 1.0) and interval(figures, "kl") == (0.25, 1.0)
    assert interval({"exact": 1.0, "a": 2.0, "low": 0.0, "high": 1.0}, "a") is None
    assert maps(figures) == {"error at layer #": {2.0: "error at layer 2", 10.0: "error at layer 10"}}
    assert maps({"top 5": 1.0}) == {} and scalars([{"top 5": 1.0}]) == ["top 5"]
    assert [less_is_better(name) for name in ("kl", "attention error", "exact", "speed")] == [True, True, False, None]
    shown = [number(value) for value in (0.0, -0.25, 12.345, 12345.6, 4e-5, 2e7)]
    assert shown == ["0.000", "-0.250", "12.35", "12346", "4.0e-05", "2.0e+07"]


def test_the_front_is_what_no_point_beats():
    rng = random.Random(1)
    for less in (True, False):
        points = [(rng.randint(1, 60), rng.randint(1, 60)) for _ in range(60)]
        sign = 1 if less else -1
        unbeaten = {
            (bits, value)
            for bits, value in points
            if not any(
                other != (bits, value) and other[0] <= bits and sign * other[1] <= sign * value for other in points
            )
        }
        found = [points[index] for index in front(points, less)]
        assert found == sorted(unbeaten) and len(found) > 1


def test_axes_hold_their_figures_and_have_round_numbers():
    for values in ([3.0], [0.0], [0.1, 1.0], [-2.5, 40.0], [20.0, 3e4]):
        axis = axis_of(values, ratios=True)
        assert all(0 < axis.place(value) < 1 for value in values)
        assert 2 <= len(axis.ticks()) <= 12 and all(axis.low <= tick <= axis.high for tick in axis.ticks())
    assert axis_of([0.25, 1.0], ratios=True).ticks() == pytest.approx([0.4, 0.6, 0.8, 1.0])
    assert axis_of([20.0, 3e4], ratios=True).logarithmic and not axis_of([0.01, 1.0], ratios=False).logarithmic
    bits = bits_axis([2.0, 8.0])
    assert bits_ticks(bits) == [2, 3, 4, 6, 8] and bits.place(4.0) == pytest.approx(0.5)


def test_names_stand_beside_their_points_and_never_in_each_others_way():
    rng, frame = random.Random(2), Box(0, 0, 300, 200)
    points = [(rng.uniform(10, 290), rng.uniform(10, 190)) for _ in range(60)]
    boxes = place(["name" * 3] * 60, points, frame, letter=12, radius=4)
    placed = [box for box in boxes if box is not None]
    assert 5 < len(placed) < 60
    assert all(box.inside(frame) for box in placed)
    for box, (x, y) in zip(boxes, points, strict=True):  # a point and its name are half a letter apart
        assert box is None or max(box.left - x, x - box.right, box.top - y, y - box.bottom) == pytest.approx(6)
    assert not any(one.meets(other) for one, other in itertools.combinations(placed, 2))
    assert not any(box.left < x < box.right and box.top < y < box.bottom for box in placed for x, y in points)


def test_the_table_has_every_method_and_figure(report):
    assert report.rows[:6] == [
        ["", "needle 64", "words"],
        ["method", "exact", "log probability", "bits", "paper", "perplexity", "bits", "paper"],
        ["Reference"],
        ["full", "1.000 [0.840, 1.000]", "-0.125", "16.00", "", "9.500 [9.000, 10.00]", "16.00", ""],
        ["Low bits"],
        ["rtn-4", "0.900 [0.700, 0.970]", "-0.225", "4.50", "4.00", "9.750 [9.250, 10.25]", "4.50", "4.00"],
    ]
    assert report.rows[7][:6] == ["worse", "0.500 [0.300, 0.700]", "-0.625", "5.00", "", "failed"]
    assert report.of("td", **{"data-value": "0.9"}) and report.of("th", scope="row") and report.of("th", scope="col")


def test_a_failed_cell_is_told_with_its_line(report):
    (failed,) = report.of("td", **{"class": "first failed"})
    assert failed["title"] == "MemoryError: no room" and failed["data-value"] == ""
    assert report.texts[report.texts.index("worse, words: ") :][:2] == ["worse, words: ", "MemoryError: no room"]
    fine = toy_run()
    fine["cells"] = fine["cells"][:4]
    assert "Failed cells" not in page(fine, "")


def test_quality_is_drawn_against_bits_with_the_front(report):
    circles = [(float(one["cx"]), float(one["cy"])) for one in report.of("circle")]
    hints = [text for text in report.texts if " bits" in text and ": " in text and "front" not in text]
    names = [hint.split(":")[0] for hint in hints if "[" in hint]
    at = dict(zip(names[:4], circles[:4], strict=True))
    assert at["rtn-2"][0] < at["rtn-4"][0] < at["worse"][0] < at["full"][0]
    assert at["full"][1] < at["rtn-4"][1] < at["worse"][1] < at["rtn-2"][1]  # upwards is more
    fronts = [text for text in report.texts if text.startswith("On the front")]
    assert fronts[0].startswith(
        "On the front, which nothing beats at fewer bits: rtn-2 (2.50 bits, 0.400), rtn-4 (4.50"
    )
    assert "worse" not in fronts[0] and len(report.of("path", **{"class": "front"})) == 2
    lows = dict(zip(names[4:], circles[4:], strict=True))
    assert lows["full"][1] > lows["rtn-2"][1] and "rtn-4 (4.50 bits, 9.750), full (16.00 bits, 9.500)" in fronts[1]
    corners = re.findall(r"[HMV ]([\d.]+)", report.of("path", **{"class": "front"})[0]["d"])
    assert corners[:4] == [f"{value:.1f}" for value in (*at["rtn-2"], *at["rtn-4"])]


def test_what_pays_with_host_memory_is_hollow_and_on_no_front(report):
    assert len(report.of("g", **{"class": "host"})) == 1  # "worse", in the column where it did not fail
    assert any("worse" in text and text.endswith("at 5.00 bits, and host memory") for text in report.texts)
    run = toy_run()
    for cell in run["cells"]:
        if cell["name"] == "rtn-2" and "sizes" in cell:
            cell["sizes"]["host_bytes"] = 1
            cell["figures"] |= {"exact": 1.0} if "exact" in cell["figures"] else {}
        if cell["name"] == "worse" and "sizes" in cell:  # as `offload`: nothing but a table lies on the device
            cell["sizes"] |= {"bits_per_value": 1e-4, "measured_bytes": 1}
    found = Reader(page(run, ""))
    (first, second) = [text for text in found.texts if text.startswith("On the front")]
    assert "rtn-2" not in first and "rtn-4 (4.50" in first and "Hollow: methods that also use host memory" in first
    assert "Not shown, because they keep no bits on the device: worse." in first and "Not shown" not in second
    ticks = [float(text) for text in found.texts if re.fullmatch(r"[\d.]+", text)]
    assert min(ticks) >= 0 and not any(0 < tick < 0.01 for tick in ticks)  # the axis begins near the first drawn point


def test_a_figure_nobody_knows_has_no_front():
    run = toy_run()
    run["cells"] = [cell | {"figures": {"speed": 1.5}} for cell in run["cells"] if "error" not in cell]
    found = Reader(page(run, ""))
    assert not found.of("path", **{"class": "front"}) and found.of("circle")
    assert any(text.startswith("Whether more or less of speed is better is not known") for text in found.texts)


def test_parts_are_a_map(report):
    start = report.rows.index(["method", "0", "0.5"])
    assert report.rows[start + 1 : start + 4] == [
        ["full", "1.000", "1.000"],
        ["rtn-4", "1.000", "0.800"],
        ["rtn-2", "0.500", "0.250"],
    ]
    shares = [one["style"] for one in report.of("td") if "style" in one]
    assert shares[:6] == [f"--share:{share}%" for share in (100, 100, 100, 73, 33, 0)]
    assert "Without colour 0.250, full colour 1.000." in report.texts


def test_memory_is_told_by_kind_on_one_scale(report):
    bars = [one["title"] for one in report.of("div") if one.get("class") == "bar"]
    assert bars[:4] == [
        "full: codes 12.00, low rank 4.00",
        "rtn-4: codes 3.37, low rank 1.13",
        "rtn-2: codes 1.87, low rank 0.62",
        "worse: codes 3.74, low rank 1.26, host memory 5.00",
    ]
    widths = [float(one["style"].removeprefix("width:").removesuffix("%")) for one in report.of("i") if "style" in one]
    assert widths[:2] == [75.0, 25.0] and sum(widths[6:9]) == pytest.approx(100 * 10 / 16, abs=0.1)
    text = page(toy_run(), "")
    assert re.findall(r'class="loss">([^<]*)<', text)[:4] == ["16.00", "4.50", "2.50", "5.00"]  # without host memory


def test_rare_kinds_are_taken_together_and_old_runs_have_one():
    run = toy_run()
    run["cells"] = run["cells"][:1]
    run["cells"][0]["sizes"]["by_kind"] = {f"kind {number}": 1000 - number for number in range(COLOURS + 3)}
    text = page(run, "")
    assert f">kind {COLOURS - 2}<" in text and f">kind {COLOURS - 1}, kind {COLOURS}" in text
    for cell in run["cells"]:
        cell.get("sizes", {}).pop("by_kind", None)
    old = Reader(page(run, ""))
    assert "device" in old.texts and "codes" not in old.texts


def test_the_foot_says_where_it_comes_from(report):
    pairs = {row[0]: row[1] for row in report.rows if len(row) == 2}
    assert pairs["command"] == "calib eval --config toy.yaml" and pairs["seed"] == "3"
    assert pairs["weights"] == "float32 beef" and pairs["model config"] == "c0ffee"
    assert pairs["versions"] == "calib 0.1.0, torch 2.13.0"
    assert pairs["column words"].endswith("sha256 " + "ab" * 32)


def test_the_page_is_alone_and_runs_its_own_script_only(report):
    text = page(toy_run(), "")
    assert not {"link", "img", "iframe", "object", "base", "form"} & {tag for tag, _ in report.elements}
    assert not any({"src", "href", "onload", "onclick"} & attributes.keys() for _, attributes in report.elements)
    assert not any(word in text for word in ("url(", "@import", "://"))
    (policy,) = (one["content"] for one in report.of("meta") if "http-equiv" in one)
    (script,) = re.findall("<script>(.*)</script>", text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy == f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    assert report.of("meta", name="viewport", content="width=device-width, initial-scale=1")


def test_nothing_of_the_run_is_obeyed():
    bad = "</td><script>alert(1)</script><b onclick='x' title=\"y\">&amp;\x00\u202e"
    run = json.loads(json.dumps(toy_run()).replace("rtn-4", "NAME").replace("words", "TITLE"))
    for cell in run["cells"]:
        cell.update({key: bad for key, value in cell.items() if value in ("NAME", "TITLE", "Low bits")})
    run["cells"][-1]["error"] = run["columns"][1]["title"] = run["config"]["name"] = bad
    run["cells"][0]["figures"] |= {bad: 1.5, f"{bad} 1": 2.0, f"{bad} 2": 3.0}
    run["columns"][0] |= {bad: bad}
    found = Reader(page(run, bad))
    shown = bad.replace("\x00", "?").replace("\u202e", "?")
    assert len(found.of("script")) == 1 and not found.of("b")
    assert shown in found.texts and any(row[:1] == [shown] for row in found.rows)
    assert any(row == ["command", shown] for row in found.rows)


@pytest.mark.parametrize("name", ["csr", "gear", "importance", "specache"])
def test_runs_of_earlier_releases_are_drawn(name):
    run = read_run(str(RESULTS / f"{name}.json"))
    found = Reader(page(run, ""))
    methods = list(dict.fromkeys(cell["name"] for cell in run["cells"]))
    assert [row[0] for row in found.rows if row[0] in methods and len(row) > 2] == methods
    assert len(found.of("svg")) == len(run["columns"])
    drawn = [cell for cell in run["cells"] if cell["sizes"]["bits_per_value"] > 0.1]  # `offload` has nothing there
    assert len(found.of("circle")) == len(drawn)
