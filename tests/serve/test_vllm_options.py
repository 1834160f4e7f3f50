"""Fields of kv_connector_extra_config: defaults, and wrong values, which are refused before an engine starts."""

import pytest
from one_line import message

from calib.runtime.methods.klt import BITS
from calib.serve.vllm.options import Options

GIVEN = {"artifact": "my.calib.safetensors", "folder": "/cache"}


def test_defaults():
    assert Options.of(GIVEN) == Options("my.calib.safetensors", "/cache", BITS, False, False, None)
    asked = {"bits": 1.5, "entropy": True, "trellis": True, "chunk": 64}
    assert Options.of({**GIVEN, **asked}) == Options("my.calib.safetensors", "/cache", **asked)


@pytest.mark.parametrize(("block", "tokens"), [(16, 256), (128, 256), (48, 288), (256, 256), (544, 544)])
def test_a_chunk_is_whole_blocks(block, tokens):
    assert Options.of(GIVEN).tokens(block) == tokens
    assert Options.of({**GIVEN, "chunk": 3 * block}).tokens(block) == 3 * block


@pytest.mark.parametrize(
    ("field", "given", "word"),
    [
        ("artifact", None, "no artifact"),
        ("folder", None, "no folder"),
        ("folder", "", "folder of kv_connector_extra_config is '', .*not empty; write"),
        ("folder", 3, "folder of kv_connector_extra_config is 3, expected a string"),
        ("entropy", "false", "entropy of .* is 'false', expected true or false; .*without quotes"),
        ("trellis", 0, "trellis of .* is 0, expected true or false"),
        ("bit", 2, "no field 'bit'"),
        ("positions", 2, "no field 'positions'"),
        ("chunk", 0, "chunk must be"),
        ("chunk", "64", "chunk must be"),
    ],
)
def test_what_is_refused(field, given, word):
    with pytest.raises(ValueError, match=word) as error:
        Options.of({**GIVEN, field: given})
    message(error)


def test_a_chunk_that_cuts_blocks_is_refused():
    with pytest.raises(ValueError, match="chunk is 100") as error:
        Options.of({**GIVEN, "chunk": 100}).tokens(16)
    message(error)
