"""A sample of the campaign of damaged blobs, and checks that the campaign notices each kind of wrong outcome."""

import pytest
import torch

from calib.runtime import BlobError, Codec
from tests.hostile.campaign_blobs import campaign

CASES, SEED = 300, 5


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.full
def test_damaged_blobs_are_refused_in_a_line_or_decoded_without_harm():
    found = campaign(range(CASES), SEED)
    assert not found["wrong"], found["wrong"][:3]
    assert found["refused"] > CASES // 3 and found["accepted"] > CASES // 20  # both occur


def kinds(monkeypatch, cases, decode):
    """The outcomes of all cases but the first, with `Codec.decode` replaced after it. (The campaign accepts its undamaged blobs
    before the first case.)"""
    told = list[str]()

    def tell(number, found):
        told.append(found.kind)
        if number + 1 == first:
            monkeypatch.setattr(Codec, "decode", decode)

    first = 1
    campaign(range(cases), SEED, tell, files=0)
    return {*told[first:]}


def raises(error):
    def decode(self, blob, out=None, device=None):
        raise error

    return decode


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (raises(RuntimeError("a frame of C++")), "tracebacks"),
        (raises(BlobError("two\nlines")), "tracebacks"),
        (raises(BlobError("x" * 500)), "tracebacks"),
        (raises(MemoryError()), "over_memory"),
        (lambda self, blob, out=None, device=None: torch.full((1,), torch.nan), "nan"),
    ],
)
def test_what_must_not_be_is_noticed(monkeypatch, change, kind):
    assert kinds(monkeypatch, 12, change) == {kind}


def test_what_is_written_before_a_refusal_is_noticed(monkeypatch):
    def decode(self, blob, out=None, device=None):
        if out is not None:
            out.zero_()
        raise BlobError("too late")

    assert kinds(monkeypatch, 12, decode) == {"refused", "tracebacks"}
