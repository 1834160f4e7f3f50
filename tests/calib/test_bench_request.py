"""Requests of `calib bench`: flags and files, an error of one line for every mistake, and sizes such as 24GiB."""

from importlib import resources
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from toy_language_model import save_toy

from calib import cli
from calib.bench.byte_sizes import parse_size, spoken_size
from calib.bench.interleave import shares
from calib.bench.request import BenchRequest, rows_of
from calib.bench.request_files import read_bench
from calib.errors import UsageError

RTN = "[{name: a, method: rtn}]"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(save_toy(tmp_path_factory.mktemp("model")))


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("24GiB", 24 * 2**30),
        ("512MB", 512 * 10**6),
        ("1.5 KiB", 1536),
        ("7B", 7),
        ("2tib", 2 * 2**40),
        (4096, 4096),
        (" 1 kB ", 1000),
    ],
)
def test_sizes(text, size):
    assert parse_size(text, "memory") == size


@pytest.mark.parametrize(
    "text", ["", "24", "24G", "GiB", "-1GiB", "1e9B", "0GiB", "0.4B", "24GiB more", True, 1.5, None, 0]
)
def test_what_is_no_size(text):
    with pytest.raises(UsageError, match=r"for 'memory'.*24GiB"):
        parse_size(text, "memory")


def test_sizes_in_words():
    assert [spoken_size(size) for size in (0, 1023, 1024, -1536, 3 * 2**40, 5000 * 2**40)] == [
        "0 B",
        "1023 B",
        "1.00 KiB",
        "-1.50 KiB",
        "3.00 TiB",
        "5000.00 TiB",
    ]


def test_shares_are_even_and_complete():
    assert shares(32, 4) == [8] * 4 and shares(7, 3) == [2, 2, 3] and shares(3, 3) == [1] * 3


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--methods", "fulll"], "'fulll'"),
        (["--methods", "{method: kivi, bit: 2}"], "methods: 'kivi': "),
        (["--methods", "full", "full"], "'full' stands twice among the methods"),
        (
            ["--methods", "full", "{name: DynamicCache again, method: rtn}"],
            "the name 'DynamicCache again' is reserved for the baseline's second row",
        ),
        (["--methods", RTN, "--baseline", "b"], "baseline 'b' is no row's name (there are a)"),
        (["--methods", "[]"], "no methods"),
        (["--methods", "{method: kivi, statistics: calibrated}"], "wants the artifact"),
        (["--methods", RTN, "--memory", "24G"], "invalid value '24G' for 'memory' (expected a size such as 24GiB"),
        (["--methods", RTN, "--contexts", "64", "x"], "invalid value 'x' in 'contexts'"),
        (["--methods", RTN, "--contexts", "64", "64"], "'64' stands twice among the contexts"),
        (["--methods", RTN, "--batches", "0"], "invalid value 0 in 'batches' (expected whole numbers, at least 1)"),
        (["--methods", RTN, "--batches=4", "5"], "unexpected argument '5'"),
        (["--methods", RTN, "--batches"], "option '--batches' needs a value"),
        (["--methods", RTN, "--turns", "1"], "invalid value 1 for 'turns' (expected a whole number, at least 2)"),
        (["--methods", RTN, "--turns", "40"], "40 turns for 32 new tokens"),
        (["--methods", RTN, "--new_tokens", "true"], "invalid value True for 'new_tokens'"),
        (["--methods", RTN, "--threads", "0"], "for 'threads'"),
        (["--methods", RTN, "--device", "mps"], "invalid value 'mps' for 'device' (expected cpu or cuda"),
        (["--methods", RTN, "--dtype", "int8"], "invalid value 'int8' for 'dtype'"),
        (["--methods", RTN, "--contxts", "64"], "unknown key 'contxts' (did you mean 'contexts'?)"),
        (
            ["--methods", "{method: streaming_llm, window: {64 tokens: 8}}"],
            "window has no value for the column '1024 tokens'",
        ),
        (["--contexts", "64"], "'--config' or '--methods' must be given"),
        (["--config", "no.yaml"], "no configuration file 'no.yaml'"),
    ],
)
def test_a_mistake_is_one_line(words, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["bench", *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("calib: error: ") and said in error and error.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["--contexts", "32", "250"],
            "context 250 and 8 new tokens need 259 positions, and the model has 256; contexts up to 247",
        ),
        (["--contexts", "32", "--device", "cuda:99"], "for 'device'"),
        (["--contexts", "32", "--artifact", "none.safetensors"], "artifact 'none.safetensors' is no file"),
        (["--methods", "{method: kivi, group: 48}"], "methods: 'kivi'"),  # of 32 channels
    ],
)
def test_what_the_model_does_not_allow_is_said_before_anything_runs(folder, words, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    asked = ["--model", folder, "--methods", "rtn", "--contexts", "32", "--new_tokens", "8"]
    assert cli.main(["bench", *asked, *words]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1 and not list(tmp_path.iterdir())


def test_the_output_is_no_file(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert cli.main(["bench", "--methods", "rtn", "--output", str(tmp_path / "file")]) == 2
    assert "is a file, expected a folder" in capsys.readouterr().err


def test_files_are_merged_and_flags_come_last(tmp_path):
    first, second = tmp_path / "first.yaml", tmp_path / "second.yaml"
    first.write_text(yaml.safe_dump({"contexts": [64], "batches": [1], "memory": "1GiB", "methods": ["full", "rtn"]}))
    second.write_text("batches: [2, 4]\nseed: 9\n")
    request = read_bench([str(first), str(second)], ["--contexts", "16", "32", "--turns=3", "--methods", "[rtn]"])
    assert (request.name, request.contexts, request.batches, request.seed) == ("second", (16, 32), (2, 4), 9)
    assert (request.turns, request.memory, [entry.label for entry in request.methods]) == (
        3,
        2**30,
        ["DynamicCache", "rtn"],
    )
    assert read_bench([str(first)], ["--contexts", "[8, 9]", "--memory", "null"]).contexts == (8, 9)
    assert read_bench([str(first)], ["--memory", "null"]).memory is None


def test_times_are_compared_with_dynamic_cache_unless_another_row_is_named(tmp_path):
    theirs = {"name": "theirs", "peer": "dynamic"}
    for methods, baseline, names, compared in (
        (["full"], {}, ["DynamicCache", "full"], "DynamicCache"),
        (["full", theirs], {}, ["full", "theirs"], "theirs"),
        (["full", "rtn"], {"baseline": "rtn"}, ["full", "rtn"], "rtn"),
    ):
        request = BenchRequest.of({"methods": methods, **baseline}, "toy")
        assert [entry.label for entry in request.methods] == names and request.baseline == compared


def test_rows_are_names_methods_and_peers_but_no_answers_of_a_file(monkeypatch):
    found = rows_of(["full", {"group": "Theirs"}, {"name": "d", "peer": "dynamic"}])
    assert [(entry.label, entry.method, entry.group) for entry in found] == [
        ("full", "full", ""),
        ("d", "peer dynamic", "Theirs"),
    ]
    answers = SimpleNamespace(label="theirs")  # a row that has no cache
    monkeypatch.setattr("calib.bench.request.read_entries", lambda content: (answers,))
    with pytest.raises(UsageError, match="only caches can be timed"):
        rows_of([{"results": "answers.json"}])


@pytest.mark.parametrize("path", sorted(Path(str(resources.files("calib") / "configs" / "bench")).glob("*.yaml")))
def test_every_shipped_bench_is_a_request(path):
    request = read_bench([f"bench/{path.name}"], [])
    assert request.name == path.stem and len(request.methods) >= 2
