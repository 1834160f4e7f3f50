"""Finding the start position of a chunk from its keys: the continuation of a known text is tried first, then all positions; an
unclear result is refused."""

import pytest
import torch
from one_line import message
from placed_chunks import placed

from calib.runtime import Codec
from calib.serve.starts import Starts

pytestmark = pytest.mark.arithmetic
TOKENS = 32


class Watched:
    """A codec that records the number of candidates of each call."""

    def __init__(self, codec):
        self._codec, self.looked = codec, []

    def start_of(self, chunk, candidates):
        self.looked.append(len({*candidates}))
        return self._codec.start_of(chunk, candidates)


@pytest.fixture(scope="module")
def codec(artifact):
    return Codec.from_artifact(artifact, bits=2)


def test_texts_are_followed(artifact, codec):
    """Chunks of a text in order, a second text from its start, and then jumps: known continuations take 2 or 3 candidates, a jump
    all 32."""
    watched, starts = Watched(codec), Starts(1024)
    for start in (0, 32, 64, 0, 32, 992, 96, 128):
        assert starts.of(watched, placed(artifact, codec, TOKENS, start, torch.float16, seed=start)) == start
    assert watched.looked == [2, 2, 3, 3, 2, 3, 32, 2, 32, 3]


def test_what_lies_beyond_the_positions_or_fits_nowhere_is_refused(artifact, codec):
    starts = Starts(1000)
    assert starts.of(codec, placed(artifact, codec, TOKENS, 960, torch.float16)) == 960
    for chunk in (
        placed(artifact, codec, TOKENS, 992, torch.float16),  # ends beyond the positions
        placed(artifact, codec, TOKENS, 16, torch.float16),  # starts at no multiple of its length
        torch.randn(2, 2, TOKENS, 64, generator=torch.Generator().manual_seed(0)),
    ):
        with pytest.raises(ValueError, match=r"no candidate fits|nearly alike") as error:
            starts.of(codec, chunk)
        message(error)
    with pytest.raises(ValueError, match="candidates are empty"):
        Starts(TOKENS - 1).of(codec, placed(artifact, codec, TOKENS, 0, torch.float16))
