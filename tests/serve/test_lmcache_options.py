"""Options of the LMCache serde `calib`: defaults, and wrong values, which are refused before a server starts."""

import pytest
from one_line import message

from calib.runtime.methods.klt import BITS
from calib.serve.lmcache.options import Options

GIVEN = {"artifact": "my.calib.safetensors", "model": "my-llama"}


def test_defaults():
    assert Options.of(GIVEN) == Options("my.calib.safetensors", "my-llama", BITS, False, None, None, 1)
    assert Options.of({**GIVEN, "bits": 1.5, "cpu_block": 128, "positions": None}).cpu_block == 128


@pytest.mark.parametrize(
    ("field", "given", "word"),
    [
        ("artifact", None, "no artifact"),
        ("artifact", "", "artifact of serde calib is .., expected a string that is not empty"),
        ("artifact", 3, "artifact of serde calib is 3, expected a string"),
        ("model", None, "no model"),
        ("bit", 2, "no field 'bit'"),
        ("positions", 0, "positions must be"),
        ("positions", "2048", "positions must be"),
        ("cpu_block", -1, "cpu_block must be"),
        ("cpu_block", True, "cpu_block must be"),
        ("max_workers", 1.5, "max_workers must be"),
    ],
)
def test_what_is_refused(field, given, word):
    with pytest.raises(ValueError, match=word) as error:
        Options.of({**GIVEN, field: given})
    message(error)
