"""Attention mass from the kernel against plain torch on the CPU."""

import pytest
import torch
from gpu.moved import moved, near

from benchmarks.gpu.inputs import queries, tokens
from benchmarks.gpu.saliency import probe_rows
from calib.kernels.probe_saliency import reference
from calib.kernels.probe_saliency.operation import attention_mass
from calib.runtime.attend.prompt_attention import prompt, prompt_normalised
from calib.runtime.attend.request import QKV, AttendRequest
from calib.runtime.logits import Logits

CPU = torch.device("cpu")
LIMITS = {torch.float32: 1e-4, torch.float16: 3e-3, torch.bfloat16: 5e-3}  # products in the inputs' dtype


@pytest.mark.parametrize(
    ("dtype", "heads", "kv_heads", "dim", "options"),
    [
        (torch.bfloat16, 8, 2, 128, {}),
        (torch.float16, 8, 2, 128, {"softcap": 4.0, "sliding": 50}),
        (torch.float32, 8, 2, 128, {"behind": (1, 40)}),
        (torch.bfloat16, 4, 4, 64, {"behind": (1, 40)}),
        (torch.float16, 4, 4, 64, {}),
        (torch.float32, 8, 1, 80, {"softcap": 4.0, "sliding": 50}),
        (torch.bfloat16, 8, 1, 80, {}),
    ],
)
def test_mass(device, times, dtype, heads, kv_heads, dim, options):
    count = 70 * times + 1
    keys = tokens(2, kv_heads, count, dim, 1, CPU, dtype)
    query, positions = queries(keys, heads, count, 2), probe_rows(count)
    given = query[:, :, positions], keys
    expected = reference.attention_mass(*given, positions, dim**-0.5, **options)
    near(attention_mass(*moved(given, device), positions, dim**-0.5, **options), expected, LIMITS[dtype])


def test_a_prompt_leaves_the_sums_of_its_rows(device, times):
    """Attention over a prompt returns the log-sum-exp of each query row if torch's backend gives it: in 16 bits on a CUDA device,
    and on a CPU. Compared with float32."""
    heads = (8, 2, 2)
    given = moved([tokens(2, own, 40 * times, 64, i, CPU, torch.float16) for i, own in enumerate(heads)], device)
    asked = AttendRequest(None, range(2), Logits(0.125), QKV(*given))
    output, found = prompt_normalised(asked)
    assert found is not None and torch.equal(output, prompt(asked))
    logits = given[0].float() @ given[1].float().repeat_interleave(4, 1).mT * 0.125
    hidden = ~torch.ones(logits.shape[-2:], device=device).tril().bool()
    near(found, logits.masked_fill(hidden, -torch.inf).logsumexp(-1).cpu(), 1e-3)
