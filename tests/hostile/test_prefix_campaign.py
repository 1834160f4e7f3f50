"""A sample of the campaign of damaged prefix files (`campaign_prefixes.py`)."""

from random import Random

import pytest
import torch
from prefix_numbers import NUMBERS, any_number
from saved_prefixes import BASES

from tests.hostile.campaign_prefixes import campaign

# One of every kind of store. The whole campaign runs over all of `BASES`.
SAMPLE = [
    ("kivi-2-short", "llama", 1.0),
    ("zipcache-short", "qwen3-mixed", 1.0),
    ("mikv-corrected", "llama", 1.0),
    ("gear", "llama", 1.0),
    ("csr-tiers", "mistral-sliding", 1.0),
    ("gear", "llama", 1e6),
    ("klt-short", "llama", 1.0),
    ("specache", "llama", 1.0),
    ("infllm", "llama", 1.0),
    ("streaming_llm", "llama", 1.0),
]
CASES, SEED = 240, 5


@pytest.mark.full
def test_damaged_files_are_refused_in_a_line_or_used_without_harm():
    assert {*SAMPLE} <= {*BASES}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found = campaign(range(CASES), SEED, chosen=SAMPLE)
    finally:
        torch.set_num_threads(threads)
    assert not found["wrong"], found["wrong"][:3]
    assert found["refused"] > CASES // 3 and found["accepted"] > CASES // 20  # both occur


def test_what_a_case_does_to_a_value_does_not_reach_the_next():
    """Drawn lists and mappings are copies: otherwise a seed and a number would not reproduce a case."""
    containers = {id(value) for value in NUMBERS if isinstance(value, list | dict)}
    drawn = [any_number(Random(number)) for number in range(500)]
    assert any(isinstance(value, list) for value in drawn)
    assert not containers & {id(value) for value in drawn}
