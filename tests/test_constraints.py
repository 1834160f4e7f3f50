"""The two files of pinned releases, and what the tests assume of them."""

from pathlib import Path


def pins(name: str) -> dict[str, str]:
    lines = (Path(__file__).parents[1] / name).read_text().splitlines()
    return dict(line.split("==") for line in lines if "==" in line)


def test_arithmetic_need_not_run_with_the_oldest_releases():
    """`make test-oldest` leaves out tests marked `arithmetic`: they depend on torch alone, of which both files pin one version."""
    assert pins("constraints.txt")["torch"] == pins("constraints-oldest.txt")["torch"]
