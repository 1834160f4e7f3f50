"""How often a kernel is compiled: prompts and caches of all lengths must share one compiled kernel.

Triton compiles anew for every combination of types and constants, of arguments that are 1, and of numbers and addresses that are
divisible by 16. A process without TRITON_INTERPRET asks Triton's own binder what a launch would be compiled for, and launches
nothing.
"""

import json
import os
import subprocess
import sys

import pytest

BINDER = """
import json, sys
from collections import defaultdict

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

backend, variants, chosen = make_backend(GPUTarget("cuda", 90, 32)), defaultdict(set), {}


def bound(self, *arguments, grid, warmup, **named):
    binder = create_function_from_signature(self.signature, self.params, backend)
    _, specialisation, chosen[self.__name__] = binder(*arguments, debug=False, **named)
    variants[self.__name__].add(str((specialisation, chosen[self.__name__])))


JITFunction.run = bound
"""

MASS = """
from calib.kernels.probe_saliency.triton import attention_mass

for tokens, probes in ((1, 1), (16, 16), (137, 35), (512, 48), (1000, 1), (1001, 100), (1003, 102), (4096, 409)):
    keys, query = torch.zeros(1, 2, tokens, 80).half(), torch.zeros(1, 4, probes, 80).half()
    attention_mass(query, keys, torch.arange(tokens - probes, tokens), 0.1, *options)
"""

CHOSEN = """
from calib.kernels.probe_saliency.triton import attention_mass

for tokens, probes in ((16, 15), (137, 35), (512, 48), (1000, 1), (1001, 100), (1003, 102), (4096, 409)):
    keys, query = torch.zeros(1, 2, tokens, 80).half(), torch.zeros(1, 4, tokens, 80).half()
    attention_mass(query, keys, torch.arange(tokens - probes, tokens), 0.1, normalisers=torch.zeros(1, 4, tokens))
"""

ENCODED = """
from calib.kernels.quantise.prologue import Prologue
from calib.kernels.quantise.triton import encode_fixed, encode_uniform

for tokens in (1, 15, 16, 96, 137, 1000, 4096):
    x = torch.zeros(1, 2, tokens * unit, 80).half()
    way(x)
"""


def variants(script: str, **more: str) -> dict[str, int]:
    """Number of variants of each kernel that Triton would compile for the launches of `script`; `more`: variables to set."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | more
    code = f"{BINDER}\n{script}\nprint(json.dumps({{name: len(own) for name, own in variants.items()}}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.full
def test_the_binder_tells_variants_apart():
    """k is 1, divisible by 16, or neither, and the address is divisible by 16 or not: six variants."""
    script = """
from calib.kernels.top_k.triton import largest
for k in (1, 5, 32):
    for scores in (torch.zeros(1, 1, 64), torch.zeros(65)[1:].view(1, 1, 64)):
        largest[(1,)](scores, None, scores, None, 64, 64, 1, 64, k, TILE=512)
"""
    assert variants(script) == {"largest": 6}


@pytest.mark.full
@pytest.mark.parametrize("default", ["0", "1", None])
def test_products_and_sums_are_fused_unless_a_launch_forbids_it(default):
    """Whatever Triton's default is, which a variable can change; Triton 3.9 warns about launches that leave it open."""
    script = """
import warnings

from calib.kernels.quantise.triton import encode_fixed
from calib.kernels.top_k.triton import top_k

warnings.simplefilter("error")
top_k(torch.zeros(1, 1, 64), 5)
encode_fixed(torch.zeros(1, 2, 16, 80), 4, 1.0)
fused = {name: backend.parse_options(dict(own)).enable_fp_fusion for name, own in chosen.items()}
assert fused == {"largest": True, "by_planes": False}, fused
"""
    assert variants(script, **({} if default is None else {"TRITON_DEFAULT_FP_FUSION": default}))


@pytest.mark.full
@pytest.mark.parametrize("options", ["()", "(None, 66)", "(3.0, None, (1, 50))"])
def test_probe_saliency_is_compiled_once_for_all_lengths(options):
    """With `behind`, or a window, a shorter prompt may need a second variant of the sums over columns."""
    found = variants(f"options = {options}\n{MASS}")
    assert found == {"row_normalisers": 1, "column_sums": 1 if options == "()" else 2}


@pytest.mark.full
def test_probes_are_chosen_by_one_program_for_all_lengths():
    assert variants(CHOSEN) == {"rows_of_probes": 1, "column_sums": 1}


@pytest.mark.full
@pytest.mark.parametrize(
    ("way", "unit", "kernel"),
    [
        ("lambda x: encode_uniform(x, (32, 1), 2, 1.0, torch.float16)", 32, "by_planes"),
        ("lambda x: encode_uniform(x, (1, 80), 2, 1.0, torch.float16)", 1, "token_groups"),
        ("lambda x: encode_uniform(x, (5, 16), 4, 1.0, torch.float16)", 5, "by_planes"),
        ("lambda x: encode_uniform(x, (1, 80), 8, 1.0, torch.float32, across_heads=True)", 1, "by_planes"),
        ("lambda x: encode_fixed(x, 4, 1.0)", 1, "by_planes"),
        ("lambda x: encode_uniform(x, (x.shape[2], 1), 4, 1.0, torch.float16)", 129, "by_planes"),
        (
            "lambda x: encode_fixed(x, 4, 1.0, Prologue(order=torch.zeros(x.shape[:3], dtype=torch.int64)))",
            1,
            "by_planes",
        ),
    ],
    ids=["keys of KIVI", "a token", "groups that torch measures", "across heads", "calibrated", "a prompt", "in order"],
)
def test_quantising_is_compiled_once_for_all_lengths(way, unit, kernel):
    assert variants(f"way, unit = {way}, {unit}\n{ENCODED}") == {kernel: 1}


@pytest.mark.full
def test_attention_is_compiled_once_for_all_lengths():
    script = """
from calib.kernels.attend.operation import PackedStream, PageSpan
from calib.kernels.attend.triton import attend_pages

pages = torch.zeros(40, 2, 128, 20, dtype=torch.int16)
stream = PackedStream(4, pages, 80)
for count in (1, 2, 3, 16, 33):
    table, used = torch.zeros(1, count, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    attend_pages(torch.zeros(1, 2, 4, 80), stream, stream, PageSpan(table, used), None, None, False, False)
"""
    assert variants(script) == {"attend": 1, "merge": 1}
