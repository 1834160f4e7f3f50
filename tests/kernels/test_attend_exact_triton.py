"""The kernel that attends exact tokens and merges other parts of the softmax, interpreted, against float64."""

from dataclasses import replace

import pytest
import torch
from launches import watch
from tolerances import FLOAT32_ATTENTION, SPLIT_SCORES

from calib.kernels.attend import exact_triton, operation
from calib.kernels.attend.operation import Attended, ExactGroup, ExactTokens
from calib.kernels.attend.options import pieces_of
from calib.kernels.attend.triton import MOST_ROWS

pytestmark = pytest.mark.arithmetic

# The kernel splits a factor into two numbers of the tokens' dtype: 16 bits with bfloat16, 22 with float16.
TOLERANCE = {torch.float32: FLOAT32_ATTENTION, torch.float16: FLOAT32_ATTENTION, torch.bfloat16: SPLIT_SCORES}


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Output buffers are filled with NaN, so that numbers which the kernel did not write are noticed."""
    monkeypatch.setenv("CALIB_KERNELS", "triton")
    monkeypatch.setattr(
        exact_triton, "room", lambda shape, like, dtype=torch.float32: torch.full(shape, torch.nan, dtype=dtype)
    )


def drawn(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Asked:
    """A query, exact tokens and parts of a softmax, and what attention over all of them is in float64."""

    def __init__(self, dtype, query_rows, dims, counts, parts, columns=1, masked="rows", softcap=None, runs=1):
        rows, heads, (key_dim, value_dim), draw = 2, 3, dims, iter(range(100))
        self.softcap, self.query = softcap, drawn(rows, heads, query_rows, key_dim, seed=next(draw)) / 4
        # Slices of longer tensors. Keys lie in memory as a projection leaves them, tokens before heads.
        keys = [drawn(rows, n + 5, heads, key_dim, seed=next(draw)).to(dtype)[:, 2 : 2 + n] for n in counts]
        keys = [part.transpose(1, 2) for part in keys]
        values = [drawn(rows, heads, n + 5, value_dim, seed=next(draw)).to(dtype)[:, :, 3 : 3 + n] for n in counts]
        scores = [self.query.double() @ part.double().mT for part in keys]
        given = len(counts) - 2  # the group between the window and the new tokens has scores and no keys
        self.groups = tuple(
            ExactGroup(values[i], None if i == given else keys[i], scores[i].float() if i == given else None)
            for i in range(len(counts))
        )
        self.hidden = None
        if masked:
            by_row, by_head = rows if masked in ("rows", "heads") else 1, heads if masked == "heads" else 1
            shape = (by_row, by_head, columns, sum(counts))
            self.hidden = torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.4
            self.hidden[..., -1] = False
        others = [drawn(rows, heads, query_rows, 9, seed=next(draw)) for _ in range(parts)]
        mixing = [drawn(rows, heads, 9, value_dim, seed=next(draw)) for _ in range(parts)]
        self.parts = []
        for number, (own, mixed) in enumerate(zip(others, mixing, strict=True)):
            if runs > 1 and number != 1:  # several runs, and one without any token; the second part has a single run
                own, mixed = own.unflatten(-1, (runs, -1)).movedim(3, 2), mixed.unflatten(2, (runs, -1))
                own = torch.cat([own, torch.full_like(own[:, :, :1], -torch.inf)], 2)
                mixed = torch.cat([mixed, mixed[:, :, :1]], 2)
            top = own.amax(-1, keepdim=True).clamp_min(-1e38)
            weights = (own - top).exp()
            wide = torch.full((*own.shape[:-1], value_dim + 7), torch.nan)  # columns of a wider mixture
            wide[..., :value_dim] = weights @ mixed
            mixture = wide[..., :value_dim] if number % 2 else wide[..., :value_dim].contiguous()
            self.parts.append(Attended(top, weights.sum(-1, keepdim=True), mixture, None))
        met = torch.cat(scores, -1)
        met = met if softcap is None else softcap * (met / softcap).tanh()
        if self.hidden is not None:
            met = met.masked_fill(self.hidden.repeat(1, 1, query_rows // columns, 1), -torch.inf)
        self.met = met
        every = torch.cat([*(own.double() for own in others), met], -1)
        self.weights, self.normaliser = every.softmax(-1), every.logsumexp(-1, keepdim=True)
        self.values = torch.cat([*(own.double() for own in mixing), *(own.double() for own in values)], 2)

    def check(self, dtype):
        tokens = ExactTokens(self.groups, self.hidden)
        assert operation.exact_supported(self.query, tokens)
        told = operation.attend_exact(self.query, tokens, self.parts, self.softcap, told=True)
        found, expected = told.output, self.weights @ self.values
        assert found.dtype == torch.float32 and found.is_contiguous()
        assert (found.double() - expected).abs().max() <= TOLERANCE[dtype] * expected.abs().max()
        assert told.scores.shape == self.met.shape and torch.equal(told.scores.isneginf(), self.met.isneginf())
        for own, exact in ((told.normaliser, self.normaliser), (told.scores, self.met)):
            own, exact = own.double().nan_to_num(neginf=0), exact.nan_to_num(neginf=0)
            assert (own - exact).abs().max() <= TOLERANCE[dtype] * exact.abs().max()
        alone = operation.attend_exact(self.query, tokens, self.parts, self.softcap, dtype=torch.bfloat16)
        assert alone.normaliser is None and alone.scores is None and torch.equal(alone.output, found.bfloat16())


@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("query_rows", "dims", "softcap", "parts"),
    [(1, (64, 64), None, 1), (3, (20, 36), 5.0, 2), (9, (128, 80), None, 0), (17, (16, 32), None, 4)],
)
def test_exact_tokens_are_joined_with_other_parts(dtype, query_rows, dims, softcap, parts):
    Asked(dtype, query_rows, dims, (37, 7, 1), parts, softcap=softcap).check(dtype)


@pytest.mark.parametrize("masked", ["rows", "heads", "all", None])
@pytest.mark.parametrize(("columns", "counts"), [(1, (1, 1)), (3, (5, 33, 3))])
def test_masks_of_rows_heads_and_columns(masked, columns, counts):
    """Query rows are group-major: row r has the mask of column r % columns."""
    Asked(torch.float32, 4 * columns, (32, 32), counts, 1, columns, masked).check(torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("query_rows", [2, 9])
def test_some_keys_of_a_window_are_scores_elsewhere(dtype, query_rows):
    """`index` maps a slot to its score. The keys of such slots are NaN, or missing behind the 30th slot, and are not read."""
    asked = Asked(dtype, query_rows, (32, 48), (37, 7, 2), 2)
    window, index = asked.groups[0], torch.full((2, 37), -1, dtype=torch.int32)
    index[0, 30:], index[1, 20:] = torch.tensor([3, 4, 9, 1, 0, 2, 7]), torch.arange(17).flip(0)
    scores = torch.full((2, 3, query_rows, 20), torch.nan)
    keys = window.keys.clone()
    for row, first in ((0, 30), (1, 20)):
        scores[row, :, :, index[row, first:].long()] = asked.query[row] @ keys[row, :, first:].float().mT
        keys[row, :, first:] = torch.nan
    asked.groups = (ExactGroup(window.values, keys[:, :, :30], scores, index), *asked.groups[1:])
    asked.check(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("programs", [1, 1000])
@pytest.mark.parametrize(
    ("query_rows", "dims", "parts", "runs"),
    [(1, (64, 64), 1, 9), (3, (20, 80), 2, 3), (9, (32, 128), 3, 9), (17, (16, 256), 1, 3), (2, (32, 32), 6, 3)],
)
def test_parts_of_several_runs_are_joined(dtype, programs, query_rows, dims, parts, runs, monkeypatch):
    """Each part has several unmerged runs. The value channels are split over programs if the device would else have too few; parts
    beyond the kernel's limit are merged before the launch."""
    monkeypatch.setattr(exact_triton, "fills", lambda device: programs)
    launched = watch(monkeypatch, "attend")
    Asked(dtype, query_rows, dims, (20, 7, 1), parts, runs=runs).check(dtype)
    launch, again = launched
    assert launch.grid == again.grid
    assert launch.grid[2] == pieces_of(dims[1], 8 if query_rows <= 8 else 16, programs // 6)
    assert launch.grid[2] * launch.arguments["DVP"] >= dims[1] and launch.arguments["RUNS"] > 1


def test_pieces_of_channels():
    """Value channels are split into as many pieces as asked for, of at least 32 channels; with a block of 16 query rows also into
    enough pieces for a program to hold two runs."""
    assert [pieces_of(128, 8, wanted) for wanted in (0, 1, 2, 3, 4, 100)] == [1, 1, 2, 2, 4, 4]
    assert [pieces_of(channels, 8, 100) for channels in (16, 64, 80, 256)] == [1, 2, 4, 8]
    assert pieces_of(256, 16, 1) == 2


@pytest.mark.parametrize("parts", [5, 16])
def test_more_parts_than_the_kernel_takes(parts):
    Asked(torch.float32, 2, (32, 32), (4, 3, 1), parts).check(torch.float32)


def test_what_is_hidden_from_a_query_has_no_part():
    """A query whose tokens are all masked, beside a part without tokens, has the output 0. If one token is visible, the output is
    that token's value."""
    new, window = (drawn(1, 2, n, 16, seed=n) for n in (1, 40))
    tokens = ExactTokens((ExactGroup(window, window), ExactGroup(new, new)), torch.ones(1, 1, 1, 41, dtype=torch.bool))
    nothing = Attended(torch.full((1, 2, 1, 1), -1e38), torch.zeros(1, 2, 1, 1), torch.zeros(1, 2, 1, 16), None)
    query = drawn(1, 2, 1, 16, seed=5)
    assert not operation.attend_exact(query, tokens, [nothing]).output.any()
    tokens.hidden[..., -1] = False
    torch.testing.assert_close(operation.attend_exact(query, tokens, [nothing]).output, new, rtol=1e-6, atol=0)


def test_what_is_not_served():
    """More query rows or channels than the kernel's limits, another dtype, channels that are not contiguous, gradients."""
    new = torch.zeros(1, 2, 1, 32)
    tokens, query = ExactTokens((ExactGroup(new, new),)), torch.zeros(1, 2, MOST_ROWS, 32)
    assert operation.exact_supported(query, tokens)
    assert not operation.exact_supported(torch.zeros(1, 2, MOST_ROWS + 1, 32), tokens)
    for part in (
        torch.zeros(1, 2, 1, 257),
        new.double(),
        torch.zeros(1, 2, 32, 1).mT[:, :, :, ::2],
        torch.zeros(1, 2, 1, 32, requires_grad=True),
    ):
        assert not operation.exact_supported(query, replace(tokens, groups=(ExactGroup(part, part),)))


def test_tokens_too_far_apart_for_offsets_of_32_bits_are_refused():
    """As a projection leaves 2^19 tokens of 32 heads of 128 channels: a token's offset from its head's first is 2^12 a token."""
    query, (heads, width) = torch.zeros(1, 32, 1, 128, dtype=torch.float16, device="meta"), (32, 128)
    for count, served in ((2**19 - 1, True), (2**19, False)):
        tokens = torch.empty(1, count, heads, width, dtype=torch.float16, device="meta").transpose(1, 2)
        assert exact_triton.supports(query, ExactTokens((ExactGroup(tokens, tokens),))) is served
