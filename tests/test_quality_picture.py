"""The pictures of quality are what their script draws from the committed runs."""

import pytest

from benchmarks.quality_picture import MOST_BITS, PICTURES, lines

each = pytest.mark.parametrize("picture", PICTURES, ids=lambda picture: picture.name)


@each
def test_the_picture_is_that_of_the_run(picture):
    assert picture.path.read_text() == "\n".join(lines(picture)) + "\n"


@each
def test_every_point_lies_inside_the_frame(picture):
    found = picture.measured()
    for name in [name for names in (*picture.curves.values(), picture.points) for name in names]:
        bits, kl = found[name]
        assert 0 < bits < MOST_BITS and picture.kl[0] < kl < picture.kl[1], name
