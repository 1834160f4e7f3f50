"""Every integer option of the methods has an upper bound, so a typing error gives one line and does not exhaust the machine."""

from dataclasses import fields

import pytest
from one_line import message
from toy_models import generate, left_padded, random_model

from calib.runtime import compress
from calib.runtime.messages.whole_numbers import MOST
from calib.runtime.methods import METHODS, build
from calib.runtime.methods.corrections import Corrections

WHOLE = [
    (name, option.name)
    for name, chosen in METHODS.items()
    for option in fields(chosen)
    if "int" in str(option.type).replace("'", "").split(" | ")[0] or "int | None" in str(option.type)
]
BESIDE = {("klt", "bytes"): {"context": 64}, ("klt", "context"): {"bytes": 64}, ("mikv", "recent"): {"budget": 2**20}}


def built_and_used(name, options):
    """Build the method, and compress a model with it: some options are checked only against the model."""
    build(name, options)
    compress(random_model("llama"), name, **options)


@pytest.mark.parametrize(("name", "option"), WHOLE, ids=str)
@pytest.mark.parametrize("number", [10**18, 10**5000], ids=["large", "5000 digits"])
def test_a_number_beyond_any_machine_is_refused(name, option, number):
    with pytest.raises(ValueError, match=f"{option}.* must be|bits must be|must not be") as error:
        built_and_used(name, {option: number, **BESIDE.get((name, option), {})})
    assert len(message(error)) < 250


@pytest.mark.arithmetic
@pytest.mark.parametrize(
    "option", [field.name for field in fields(Corrections) if field.name not in ("outliers", "statistics")]
)
def test_corrections_have_an_end_too(option):
    with pytest.raises(ValueError, match=f"{option} must be"):
        build("kivi", {"corrections": {option: 10**18}})


@pytest.mark.full
def test_a_window_longer_than_any_text_answers_at_once():
    """The time to check that keys and values have compatible schedules does not grow with the window."""
    model, inputs = random_model("llama"), left_padded([40, 30])
    with compress(model, "kivi", residual=MOST) as cache:
        compressed = generate(model, inputs, cache).sequences
    with compress(model, "full") as cache:
        assert generate(model, inputs, cache).sequences.tolist() == compressed.tolist()
    with pytest.raises(ValueError, match="residual must be a whole number, at most 1073741824, got 10000000000"):
        compress(model, "kivi", residual=10**15)


@pytest.mark.arithmetic
def test_large_blocks_and_values_in_messages():
    for name in ("csr", "gear", "klt", "zipcache"):
        option = "recompress" if name == "zipcache" else "block"
        with pytest.raises(ValueError, match=f"^{option} must be a whole number, at most 65536, got 100000"):
            build(name, {option: 100_000})
    bomb: object = [0] * 9
    for _ in range(60):
        bomb = [bomb] * 9
    for name, options in (("zipcache", {"tiers": bomb}), ("kivi", {"bits": bomb}), ("csr", {"index": bomb})):
        with pytest.raises(ValueError, match="got") as error:
            built_and_used(name, options)
        message(error)
    with pytest.raises(ValueError, match="unknown method"):
        build(bomb, {})  # type: ignore[arg-type]
