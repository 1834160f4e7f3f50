"""Prefix files with correct checksums and wrong contents: each is refused in one line.

`outcome` limits time and memory. Its results other than "refused" and "accepted" are another exception, a hang, too much memory, or
logits of NaN.
"""

import json
import os
import struct

import pytest
import torch
from saved_prefixes import Base, File

from calib.runtime import compress
from calib.runtime.files.state import LARGEST
from calib.runtime.prefix.file import KEY
from calib.runtime.prefix.prefix import PrefixError
from tests.hostile.campaign_prefixes import outcome

NAN, HUGE = float("nan"), 10**12


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """Saved caches by name of their case, each made once; "case sliding": of a model with sliding-window attention in one layer."""
    folder, made = tmp_path_factory.mktemp("bases"), {}

    def base(name: str) -> Base:
        if name not in made:
            case, _, sliding = name.partition(" ")
            made[name] = Base.saved(case, "qwen3-mixed" if sliding else "llama", 1.0, folder)
        return made[name]

    return base


def refused(base: Base, path, data: bytes) -> str:
    """Assert that the file is refused; return the message."""
    path.write_bytes(data)
    kind, told = outcome(base, path, len(data))
    assert kind == "refused", told
    return told


def numbers(**values):
    """A change that sets numbers of the document by their paths; a double underscore stands for a slash."""

    def change(file: File) -> None:
        for name, value in values.items():
            assert name.replace("__", "/") in file.document["numbers"]
            file.document["numbers"][name.replace("__", "/")] = value

    return change


def tensors(ending: str, value):
    """A change that fills the tensors whose names end with `ending`."""

    def change(file: File) -> None:
        chosen = [name for name in file.tensors if name.endswith(ending)]
        assert chosen
        for name in chosen:
            file.tensors[name].fill_(value)

    return change


def one_entry(ending: str, value):
    """A change that sets the last entry of the first tensor whose name ends with `ending`."""

    def change(file: File) -> None:
        file.tensors[next(name for name in file.tensors if name.endswith(ending))].view(-1)[-1] = value

    return change


def added(name: str, value):
    def change(file: File) -> None:
        assert name not in file.document["numbers"]
        file.document["numbers"][name] = value

    return change


def document(**parts):
    def change(file: File) -> None:
        file.document |= parts

    return change


def everywhere_seen(value):
    def change(file: File) -> None:
        for name in file.document["numbers"]:
            if name.endswith("/seen"):
                file.document["numbers"][name] = value

    return change


def a_page_twice(file: File) -> None:
    rows = file.document["numbers"]["rows/tables/0/rows"]
    assert len(rows[0]) > 1
    rows[0][1] = rows[0][0]


def a_page_of_another_position(file: File) -> None:
    rows = file.document["numbers"]["rows/tables/0/rows"]
    rows[1][0] = rows[0][1]


def without_layer(file: File) -> None:
    for where in (file.document["numbers"], file.tensors):
        for name in [name for name in where if name.startswith("layers/1/")]:
            del where[name]


def in_another_dtype(file: File) -> None:
    for name, tensor in file.tensors.items():
        if name.startswith("layers/") and tensor.dtype == torch.float32:
            file.tensors[name] = tensor.half()
    numbers(layers__0__dtype="float16", layers__1__dtype="float16")(file)


def deep(levels: int):
    value = 1
    for _ in range(levels):
        value = [value]
    return value


CHANGES = {
    "as many pages as fit no memory": ("kivi-2-short", numbers(rows__tables__0__capacity=HUGE), "'capacity' is"),
    "more pages than tensors have": ("kivi-2-short", numbers(rows__tables__0__capacity=10**9), "pages at most"),
    "heads that the model has not": ("zipcache-short", numbers(layers__0__keys_shape=[10**6, 10**6]), "2 heads of 32"),
    "a name below a leaf": ("kivi-2-short", added("layers/0/seen/x", 1), "lies below another leaf"),
    "a name of a number and a tensor": (
        "kivi-2-short",
        added("layers/0/store/keys/window/tokens", 1),
        "is there twice",
    ),
    "numbers that are no mapping": ("kivi-2-short", document(numbers=3), "its 'numbers' is 3, expected dict"),
    "a fingerprint that is no mapping": ("kivi-2-short", document(fingerprint=[1]), "expected dict"),
    "what made it, that is no mapping": ("kivi-2-short", document(made="kivi"), "expected dict"),
    "a branch that is no mapping": ("rtn-4", added("layers/7", 3), None),
    "more tokens than columns": (
        "streaming_llm",
        numbers(rows__lengths=[1000, 1000], rows__prompts=[1, 1]),
        "have seen",
    ),
    "fewer tokens than pages": ("kivi-2-short", numbers(rows__lengths=[20, 20]), "expected 0 for its tokens"),
    "columns of a layer of its own": ("kivi-2-short", numbers(layers__0__seen=9), "have seen [9, 154] columns"),
    "more columns than are ever counted": ("streaming_llm", everywhere_seen(2**31), "expected 0 ... 2147483647"),
    "as many columns as fit no memory": ("streaming_llm", everywhere_seen(2**31 - 1), "'input_ids' is"),
    "a length beyond every page": ("kivi-2-short", numbers(rows__lengths=[10**6, 10**6]), "for its tokens"),
    "no rows": ("kivi-2-short", numbers(rows__lengths=[]), "pages of 2 rows"),
    "rows without tokens": ("streaming_llm", numbers(rows__lengths=[0, 0], rows__prompts=[0, 0]), "expected 0 for"),
    "prompts longer than their rows": ("h2o", numbers(rows__prompts=[10**6, 10**6]), "prompts have"),
    "a page twice in a row": ("rtn-4", a_page_twice, "expected one index"),
    "a page in two rows' different positions": ("rtn-4", a_page_of_another_position, "expected one index"),
    "a scale that is NaN": ("kivi-2-short", one_entry("parameters", NAN), "from nan"),
    "infinite values": ("full", one_entry("exact", float("inf")), "to inf"),
    "scales below 0 that tokens are divided by": ("zipcache-short", tensors("/scale", -1.0), "are divided by it"),
    "a dictionary's index beyond its atoms": ("csr-both", tensors("indices", 255), "holds the index 255"),
    "an index of 16 bits beyond its atoms": ("csr-paper", one_entry("indices", -1), "holds the index 65535"),
    "atoms that are no unit vectors": ("csr-short", tensors("atoms", 100.0), "vectors of length"),
    "a key outlier's channel beyond a head": ("gear", tensors("keys.outliers.index", 255), "holds the index 255"),
    "a value outlier's channel beyond a head": ("gear", tensors("values.outliers.index", -1), "holds the index 127"),
    "an outlier's token beyond its segment": ("gear", tensors("values.outliers.index", 500), "holds the index 500"),
    "outliers beyond their list": ("gear", tensors("outliers.starts", 10**6), "holds the index 1000000"),
    "outliers that begin anywhere": ("gear", tensors("outliers.begins", -1), None),
    "an outlier's token beyond its matrix": ("gear-paper", tensors("outliers.tokens", 250), "holds the index 250"),
    "float8 numbers that are none": ("csr-both", one_entry("coefficients", 0x7F), "float8 numbers that are NaN"),
    "positions beyond a row": ("csr-tiers", tensors("positions", 10**6), "positions in tier 0 of row 0"),
    "positions below 0": ("mikv-16-2", tensors("positions", -5), "positions in tier 0 of row 0"),
    "fetched tokens beyond a row": ("specache", tensors("pool/positions", 10**6), "of fetched tokens"),
    "a token that is fetched twice": ("specache", tensors("pool/positions", 1), "occur twice"),
    "a guess that is no token": (
        "specache",
        tensors("speculative_tokens", 101),
        "'speculative_tokens' are 101 ... 101",
    ),
    "ids that are no tokens": ("rtn-4", one_entry("input_ids", -1), "expected token ids of the model, 0 ... 100"),
    "a layer that slides, gone": ("kivi-2-short sliding", without_layer, "'seen' is absent"),
    "another dtype": ("kivi-2-short", in_another_dtype, "keys of float16, expected float32"),
    "room for a segment that fits no memory": (
        "gear",
        numbers(layers__0__store__tiers__0__longest=2**31 - 1),
        "expected torch.float16",
    ),
    "deep nesting": ("kivi-2-short", document(numbers={"x": deep(500)}), "nested deeper than 32 levels"),
    "a number of thousands of digits": ("kivi-2-short", numbers(layers__0__seen=10**4000), "a number of 13288 bits"),
    "a long value with control characters": (
        "kivi-2-short",
        numbers(layers__0__dtype="\x1b[31m\n" * 10_000),
        r"'\x1b[31m\n\x1b[31m",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_forged_is_refused(bases, tmp_path, name):
    case, change, told = CHANGES[name]
    base = bases(case)
    file = File.of(base.data)
    change(file)
    if told is None:  # may be refused or accepted
        (tmp_path / "forged").write_bytes(file.data())
        kind, words = outcome(base, tmp_path / "forged", len(file.data()))
        assert kind in ("refused", "accepted"), words
    else:
        assert told in refused(base, tmp_path / "forged", file.data())


@pytest.mark.full
@pytest.mark.parametrize("case", ["zipcache-corrected", "mikv-corrected", "gear", "kivi-corrected", "specache", "h2o"])
@pytest.mark.parametrize("size", [LARGEST, -LARGEST])
def test_the_largest_numbers_that_are_accepted_give_finite_logits(tmp_path, case, size):
    base = Base.saved(case, "llama", 1e6, tmp_path)
    file = File.of(base.data)
    for name, tensor in file.tensors.items():
        if tensor.is_floating_point() and not name.endswith(("/half", "/scale", "/balance")):
            most = torch.finfo(tensor.dtype).max
            tensor.fill_(max(-most, min(most, size)))
    (tmp_path / "forged").write_bytes(file.data())
    kind, told = outcome(base, tmp_path / "forged", len(file.data()))
    assert kind == "accepted", told


def header(change):
    """A change of the header's entry of the first tensor."""

    def edit(data: bytes) -> bytes:
        file = File.of(data)
        file.header.append(lambda found: change(found, next(name for name in found if name != "__metadata__")))
        return file.data()

    return edit


def shape(value):
    return header(lambda found, name: found[name].update(shape=value))


def raw_header(text: bytes):
    return lambda data: struct.pack("<Q", len(text)) + text + data[8:]


HEADERS = {
    "more axes than torch has": header(lambda found, name: found[name].update(shape=[1] * 300 + found[name]["shape"])),
    "a negative size": shape([-1]),
    "a size of 2^63": shape([2**63]),
    "sizes that overflow": shape([2**62, 2**62]),
    "empty, of sizes that overflow": shape([0, 2**62, 2**62]),
    "a dtype that no cache has": header(lambda found, name: found[name].update(dtype="F8_E4M3")),
    "complex numbers": header(lambda found, name: found[name].update(dtype="C64")),
    "offsets that overlap": header(lambda found, name: found[name].update(data_offsets=[0, 8])),
    "no text": raw_header(b"\xff\xfe{}"),
    "text that is not UTF-8": lambda data: data.replace(b'"layers/0', b'"layers/\xff', 1),
    "deep nesting": raw_header(b'{"a":' * 10_000 + b"1" + b"}" * 10_000),
    "a header longer than the file": lambda data: struct.pack("<Q", 2**63) + data[8:],
    "metadata that is deep": header(lambda found, name: found["__metadata__"].update({KEY: "[" * 10**5})),
    "metadata with a number that is infinite": header(
        lambda found, name: found["__metadata__"].update(
            {
                KEY: json.dumps({**json.loads(found["__metadata__"][KEY]), "made": {"a": 0}}).replace(
                    '"a": 0', '"a": 1e999'
                )
            }
        )
    ),
    "metadata that is a list": header(lambda found, name: found["__metadata__"].update({KEY: "[1]"})),
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_header_that_is_forged_is_refused(bases, tmp_path, name):
    base = bases("kivi-2-short")
    data = HEADERS[name](base.data)
    assert data != base.data
    refused(base, tmp_path / "forged", data)


def test_a_pipe_is_refused_and_not_waited_for(bases, tmp_path):
    base = bases("kivi-2-short")
    os.mkfifo(tmp_path / "pipe")
    kind, told = outcome(base, tmp_path / "pipe", 0)
    assert kind == "refused" and "is no regular file" in told


def test_a_path_with_a_zero_byte_is_refused(bases):
    base = bases("kivi-2-short")
    with pytest.raises(PrefixError, match="is no path"):
        compress(base.model, base.case.method, prefix="a\0b", **base.case.options)


def test_what_would_be_refused_is_not_saved(bases, tmp_path):
    base = bases("kivi-2-short")
    with base.case.open(base.model) as cache, torch.no_grad():
        base.model(input_ids=torch.full((1, 20), 3), past_key_values=cache)
        cache.layers[0].store.streams[0].window.tokens[0, 0, 0, 0] = NAN
        with pytest.raises(
            PrefixError, match="cannot be saved: 'layers/0/store/keys/window/tokens' has values from nan"
        ):
            cache.save(tmp_path / "prefix.safetensors")
    assert not list(tmp_path.iterdir())
