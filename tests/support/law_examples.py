"""The number of hypothesis examples of a law: what its test asks for, but at most FEW in a quick run (`pytest --quick`)."""

from hypothesis import settings

FEW = 10

settings.register_profile("quick", max_examples=FEW)


def take_few() -> None:
    """Load the profile of quick runs; call it before test files are imported, which read their number of examples then."""
    settings.load_profile("quick")


def examples(asked: int) -> int:
    """The number for `settings(max_examples=...)` of a test that asks for `asked` examples."""
    return min(asked, FEW) if settings().max_examples == FEW else asked
