"""SpeCache's prefetch: positions of the largest scores, their keys and values from host memory, and the masks for fetched tokens.
Kernels against plain torch on the CPU."""

import pytest
import torch
from gpu.moved import moved

from benchmarks.gpu.operations import operation
from calib.kernels.fetched_masks import reference as masks_reference
from calib.kernels.fetched_masks.operation import fetched_masks
from calib.kernels.host_gather import reference
from calib.kernels.host_gather.operation import exchange
from calib.kernels.probability_mass import reference as mass_reference
from calib.kernels.probability_mass.operation import ScoredTokens, add_mass_by_position, mass_by_position
from calib.kernels.top_k import reference as top_k_reference
from calib.kernels.top_k.operation import divided, top_k
from calib.runtime.paging.pinned_kv import host_zeros

host_gather = operation("host_gather", "host_gather")


@pytest.mark.parametrize(("count", "k"), [(1000, 64), (129, 8), (64, 64), (700, 1)])
def test_top_k(device, times, count, k):
    scores = torch.randn(2, 3, count * times)
    scores[0, 0, ::3] = 1.5  # equal scores, of which only some are chosen
    scores[1, 1, k // 2 :] = -torch.inf  # fewer than k
    assert torch.equal(top_k(scores.to(device), k).cpu(), top_k_reference.top_k(scores, k))
    ends = torch.tensor([[3, scores.shape[2] - 5], [count // 2, scores.shape[2]]], dtype=torch.int32)
    assert torch.equal(
        top_k(*moved((scores,), device), k, ends.to(device)).cpu(), top_k_reference.top_k(scores, k, ends)
    )


@pytest.mark.parametrize("counts", [(60, 40), (100, 0), (0, 20), (20, 50, 30)], ids=str)
def test_scores_in_parts(device, times, counts):
    """A prompt's tokens are divided into tiers by score, with many equal scores; contiguous, and as a slice of a larger tensor."""
    scores = (torch.randn(2, 3, 100 * times + 7) * 4).round()[..., 7:]
    counts = [count * times for count in counts]
    for form in (scores, scores.contiguous()):
        found = divided(form.to(device), counts)
        for mine, other in zip(found, top_k_reference.divided(scores, counts), strict=True):
            assert torch.equal(mine.cpu(), other)


def chosen_of(n: int, reach: int, seed: int) -> torch.Tensor:
    """int64 `[3, 2, n]`: different tokens below `reach`, and about a fifth of -1."""
    draw = torch.Generator().manual_seed(seed)
    found = torch.stack([torch.randperm(reach, generator=draw)[:n] for _ in range(6)]).view(3, 2, n)
    return found.masked_fill(torch.rand(found.shape, generator=draw) < 0.2, -1)


@pytest.mark.parametrize("n", [5, 64, 700])
def test_exchange(device, n):
    """Eight exchanges after each other. The kernel updates entries that other threads of its program read."""
    held, table = chosen_of(n, 2 * n, 0).int(), torch.arange(3 * n, dtype=torch.int32).view(3, n)
    on_device, count, expected = held.to(device, copy=True), torch.zeros(1, dtype=torch.int64), held.clone()
    counted = count.to(device, copy=True)
    for seed in range(1, 9):
        chosen = chosen_of(n, 2 * n, seed)
        found = exchange(on_device, chosen.to(device), table.to(device), 2, 2 * n, counted)
        plain = reference.exchange(expected, chosen, table, 2, 2 * n, count)
        assert torch.equal(on_device.cpu(), expected) and torch.equal(counted.cpu(), count)
        assert torch.equal(found[2].cpu(), plain[2])
        for one, two in zip(found[:2], plain[:2], strict=True):
            assert torch.equal(one.cpu()[plain[2]], two[plain[2]])


@pytest.mark.parametrize("n", [16, 300])
def test_fetched_masks(device, times, n):
    reach = 600 * times
    fetched, draw = chosen_of(n, reach, 3).int(), torch.Generator().manual_seed(0)
    exact = torch.stack([torch.randperm(reach, generator=draw)[:70] for _ in range(3)])[:, None]
    hidden, back = torch.rand(3, 1, 2, 70, generator=draw) < 0.3, torch.tensor([[4, 5], [200, 201], [-1, 0]])
    given = exact, hidden, back[:, None, :, None]
    found = fetched_masks(fetched.to(device), range(32, reach), *moved(given, device))
    for one, two in zip(found, masks_reference.fetched_masks(fetched, range(32, reach), *given), strict=True):
        assert torch.equal(one.cpu(), two)


def test_mass_by_position(device, times):
    """Pages in order, a window whose positions all heads share, and fetched tokens of each head; every position is visible once."""
    draw, reach = torch.Generator().manual_seed(0), 300 * times
    order = torch.stack([torch.randperm(reach - 70, generator=draw) for _ in range(6)]).view(3, 2, -1)
    fetched = order[..., :40].int()
    window = torch.stack([reach - 70 + torch.randperm(70, generator=draw) for _ in range(3)])[:, None]
    scores = torch.randn(3, 2, 8, reach - 70, generator=draw).scatter(
        3, fetched.long()[:, :, None].expand(-1, -1, 8, -1), -torch.inf
    )
    spans = [
        ScoredTokens(scores, positions=0),
        ScoredTokens(torch.randn(3, 2, 8, 70, generator=draw), positions=window),
        ScoredTokens(torch.randn(3, 2, 8, 40, generator=draw), positions=fetched),
    ]
    normaliser = torch.cat([span.scores for span in spans], -1).logsumexp(-1, keepdim=True)
    numbers = [0, window.to(device), fetched.to(device)]
    there = [ScoredTokens(span.scores.to(device), positions=at) for span, at in zip(spans, numbers, strict=True)]
    found = mass_by_position(there, normaliser.to(device), reach)
    torch.testing.assert_close(found.cpu(), mass_reference.mass_by_position(spans, normaliser, reach))


def test_mass_is_added_by_position(device, times):
    """Spans are a window, without its first slots and with unused ones masked, and each row's new token. Mass is added to the
    middle rows of a larger tensor, with weights of 1 or 0 as uint8; other elements keep their bits."""
    draw, slots, first = torch.Generator().manual_seed(1), 70 * times, 4
    used = torch.tensor([slots - 1, 9, slots // 2])[:, None, None]
    scores = torch.randn(3, 2, 8, slots + 1, generator=draw)
    scores[..., :-1].masked_fill_(torch.arange(slots) >= used[..., None], -torch.inf)
    normaliser, there = scores.logsumexp(-1, keepdim=True), torch.rand(5, 2, slots + 6, generator=draw)
    probes = torch.tensor([1, 1, 0]).byte()[:, None, None]
    expected, given = there.clone(), (scores, normaliser, probes, used)

    def add(mass, scores, normaliser, probes, used):
        window = scores[..., first:-1]
        spans = [
            ScoredTokens(window, probes.expand(-1, -1, window.shape[3]), first),
            ScoredTokens(scores[..., -1:], probes, used),
        ]
        return spans, normaliser, mass[1:4]

    mass_reference.add_mass_by_position(*add(expected, *given))
    masses = [there.to(device, copy=True) for _ in range(2)]
    for mass in masses:
        add_mass_by_position(*add(mass, *moved(given, device)))
    torch.testing.assert_close(masses[0].cpu(), expected)
    unmet = expected == there
    assert unmet.any() and torch.equal(masses[0].cpu()[unmet], there[unmet])
    assert torch.equal(*masses)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_host_gather(device, dtype):
    """The kernel reads the pages from host memory; on a GPU it is pinned and mapped to the device."""
    draw = torch.Generator().manual_seed(1)
    pages = torch.randn(9, 2, 128, 96, generator=draw).to(dtype)
    on_host = host_zeros(pages.shape, dtype, device)
    on_host.copy_(pages)
    shape = (3, 2, 40)
    numbers, slots = (torch.randint(0, most, shape, generator=draw) for most in (9, 128))
    wanted, into = torch.rand(shape, generator=draw) < 0.6, torch.randn(*shape, 96, generator=draw).to(dtype)
    found = into.to(device, copy=True)
    host_gather(on_host, *moved((numbers, slots, wanted), device), found)
    reference.host_gather(pages, numbers, slots, wanted, into)
    assert torch.equal(found.cpu(), into)
