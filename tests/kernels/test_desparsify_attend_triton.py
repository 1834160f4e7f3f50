"""Attention over sparse codes (pairs of atom and coefficient, CSR): the interpreted kernel against plain torch, and plain torch
against attention in float64 over the tokens that a real cache decodes."""

from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import pytest
import torch
import triton.language as tl
from csr.scenarios import Scenario
from layer_walk import feed
from tolerances import FLOAT32_ATTENTION
from torch import Tensor
from triton import jit

from calib.kernels.attend.packed_pages import Attended
from calib.kernels.attend.reference import whole
from calib.kernels.desparsify_attend import reference, triton
from calib.kernels.desparsify_attend.operation import desparsify_attend
from calib.kernels.desparsify_attend.reference import SparsePages
from calib.kernels.desparsify_attend.triton_pairs import coefficient_of
from calib.kernels.pack.reference import pack_bytes
from calib.runtime.rotation import Rotation
from calib.runtime.stages.codec import Sparse
from calib.runtime.tiered.tier import POSITIONS, Tier

pytestmark = pytest.mark.arithmetic

LOWEST = torch.finfo(torch.float32).min
REACH = 300


@dataclass(frozen=True)
class Case:
    """A tier with `used` slots in each row: shapes, format of the pairs, and options of the scores."""

    used: tuple[int, ...] = (40, 17)
    dim: int = 32
    rotated: int | None = None  # channels that RoPE rotates; None: all
    queries: int = 2
    columns: int = 1
    heads: int = 1
    sparsity: int = 2
    chunks: int = 1
    value_dim: int | None = None
    atoms: int = 20
    online: int = 0
    coefficients: str | int = "fp16"
    table: torch.dtype = torch.float16
    int16: bool = False
    slots: int = 32
    positions: bool = False
    softcap: float | None = None
    sliding: bool = False
    query: torch.dtype = torch.float32

    def __str__(self) -> str:
        own = ((part.name, getattr(self, part.name), part.default) for part in fields(self))
        return ", ".join(f"{name}={value}" for name, value, usual in own if value != usual) or "usual"

    @cached_property
    def arguments(self) -> tuple[Any, ...]:
        """Arguments of the operation: pages in random order, and random pairs also in unused slots."""
        draw = torch.Generator().manual_seed(1)
        rows, longest = len(self.used), -(-max(self.used) // self.slots)
        pages = rows * longest + 3
        query = torch.randn(rows, self.heads, self.queries, self.dim, generator=draw) * 2 * self.dim**-0.5
        keys, values = (
            self._stream(pages, chunks, dim // chunks, draw)
            for chunks, dim in ((1, self.dim), (self.chunks, self.value_dim or self.dim))
        )
        numbers = torch.randperm(pages, generator=draw)[: rows * longest].view(rows, longest).int()
        table = torch.cat([numbers, numbers], 1)[:, :longest]  # a slice of a longer table
        positions = torch.randint(0, REACH, (pages, self.heads, self.slots, 1), generator=draw).int()
        back = torch.randint(0, 60, (rows, self.columns), generator=draw) if self.sliding else None
        placed = positions if self.positions else None
        used = torch.tensor(self.used, dtype=torch.int32)
        return query.to(self.query), keys, values, table, used, self._cos_sin(), placed, self.softcap, back

    def _stream(self, pages: int, chunks: int, width: int, draw: torch.Generator) -> SparsePages:
        pairs, atoms = self.sparsity * chunks, self.atoms + self.online
        index = torch.randint(0, atoms, (pages, self.heads, self.slots, pairs), generator=draw)
        packed = index.to(torch.int16) if self.int16 else pack_bytes(index, max(1, (atoms - 1).bit_length()))
        coefficients = torch.randn(index.shape, generator=draw)
        offline = torch.randn(self.atoms, width, generator=draw).to(self.table) if self.atoms else None
        own = torch.randn(len(self.used), self.online, width, generator=draw).to(self.table) if self.online else None
        found = SparsePages(packed, coefficients.half(), self.sparsity, chunks, offline, own)
        if isinstance(self.coefficients, int):
            codes = torch.randint(0, 2**self.coefficients - 1, index.shape, generator=draw)
            scale = torch.rand(*index.shape[:3], 1, generator=draw)
            return replace(
                found, coefficients=pack_bytes(codes, self.coefficients), bits=self.coefficients, scale=scale
            )
        kept = {
            "fp16": coefficients.half(),
            "fp32": coefficients * 1e5,
            "fp8": (coefficients * 2.0 ** torch.randint(-9, 3, index.shape, generator=draw)).to(torch.float8_e4m3fn),
        }[self.coefficients]
        return replace(found, coefficients=kept.view(torch.uint8) if self.coefficients == "fp8" else kept)

    def _cos_sin(self) -> tuple[Tensor, Tensor] | None:
        rotated = self.dim if self.rotated is None else self.rotated
        if not rotated:
            return None
        return Rotation(10000.0 ** (-torch.arange(rotated // 2).double() * 2 / rotated)).along(
            0, REACH, torch.device("cpu")
        )


CASES = [
    Case(),
    # Lengths: one token beside an empty row; one token less than a page, a page, one more.
    Case(used=(1, 0)),
    Case(used=(63, 64, 65), slots=64, queries=4),
    Case(used=(1000,), slots=128, sparsity=1, queries=1, rotated=0),
    # Channels, some of them rotated, and values of another width.
    Case(used=(40,), dim=64, queries=4),
    Case(used=(40,), dim=80, queries=8, rotated=32, chunks=2),
    Case(used=(40,), dim=96, chunks=3),
    Case(used=(40,), dim=128, queries=4, chunks=2),
    Case(used=(20,), dim=256, chunks=4, queries=1),
    Case(used=(40,), dim=64, value_dim=32),
    Case(rotated=16, heads=2, queries=8),
    Case(rotated=0, chunks=4, queries=17),
    # Indices of 1 ... 16 bits, in every alignment to bytes.
    Case(atoms=2, sparsity=3),
    Case(atoms=1, online=2, sparsity=5),
    Case(atoms=7, sparsity=7),
    Case(atoms=100, sparsity=3, chunks=2),
    Case(atoms=400, sparsity=8),
    Case(atoms=5000, sparsity=3),
    Case(atoms=5000, online=15000, sparsity=3, chunks=2),
    Case(atoms=40_000, sparsity=2),
    Case(atoms=40_000, sparsity=2, int16=True),
    # A row's online atoms, with and without offline ones; atoms in float32, and of a width that is no multiple of 16 bytes.
    Case(used=(37, 40, 33), online=9, heads=2, int16=True),
    Case(atoms=0, online=13, chunks=2, rotated=16),
    Case(atoms=3, online=4, table=torch.float32),
    Case(dim=36, online=4, rotated=20),
    # Coefficients.
    Case(coefficients="fp8", sparsity=4, chunks=2),
    Case(coefficients="fp32", queries=1),
    # Logits: positions, a soft cap, a sliding window that hides all of some columns.
    Case(positions=True, heads=2),
    Case(softcap=1.5, queries=4),
    Case(sliding=True, queries=6, columns=2),
    Case(sliding=True, positions=True, softcap=3.0, queries=6, columns=3, heads=2, online=5, coefficients="fp8"),
    Case(query=torch.float16, queries=4),
    Case(query=torch.bfloat16),
]


def near(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    """Assert that two parts of a softmax (top, mass, mixed) are equal within FLOAT32_ATTENTION, relative to the largest logit."""
    for mine, other in zip(found, expected, strict=True):
        assert mine.shape == other.shape and mine.dtype == torch.float32
    (top, mass, mixed), (other, weight, sums) = found, expected
    assert torch.equal(mass == 0, weight == 0) and torch.equal(top == LOWEST, other == LOWEST)
    met = other != LOWEST
    largest = other[met].abs().max() if met.any() else 1.0
    assert float((top - other)[met].abs().max() if met.any() else 0) <= FLOAT32_ATTENTION * float(largest)
    # An absolute error of a logit is a relative error of its weight.
    allowed = FLOAT32_ATTENTION * max(1.0, float(largest))
    assert float((mass - weight).abs().max()) <= allowed * float(weight.abs().max())
    assert float((mixed - sums).abs().max()) <= allowed * float(sums.abs().max())


def flat(found):
    """A merged part as the tuple that the reference returns."""
    return found.top[..., 0], found.mass[..., 0], found.mixed


def joined(top, mass, mixed):
    """Merge the kernel's runs, in the reference's form."""
    return flat(whole(Attended(top[..., None], mass[..., None], mixed, None)))


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch):
    """Output buffers are filled with NaN, so that unwritten numbers are noticed."""
    monkeypatch.setattr(triton, "empty", lambda *sizes, like: torch.full(sizes, torch.nan))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_kernel_does_what_plain_torch_does(case):
    assert triton.supports(*case.arguments[:3])
    near(joined(*triton.desparsify_attend(*case.arguments)), reference.desparsify_attend(*case.arguments))


@pytest.mark.parametrize(("programs", "splits"), [(1, 1), (4, 2), (12, 5), (1024, 5)])
def test_splits_meet_in_one_softmax(programs, splits, monkeypatch):
    """Two rows with a table of five pages, in up to five splits; the second row has no token in the last ones."""
    monkeypatch.setattr(triton, "PROGRAMS", programs)
    case = Case(used=(70, 20), slots=16, sparsity=1, sliding=True)
    parts = triton.desparsify_attend(*case.arguments)
    assert [part.shape[2] for part in parts] == [splits] * 3
    near(joined(*parts), reference.desparsify_attend(*case.arguments))


def test_tiles_meet_in_one_softmax(monkeypatch):
    case = Case(used=(150, 37), positions=True, sliding=True, online=5)
    at_once = reference.desparsify_attend(*case.arguments)
    monkeypatch.setattr(reference, "TILE_TOKENS", 64)
    near(reference.desparsify_attend(*case.arguments), at_once)


@jit
def _every_coefficient(kept, into):
    number = tl.arange(0, 256)
    tl.store(into + number, coefficient_of(kept, number, number >= 0, True))


def test_every_float8():
    """All 256 numbers of float8_e4m3fn, subnormal ones and NaN included."""
    every, found = torch.arange(256, dtype=torch.uint8), torch.empty(256)
    _every_coefficient[(1,)](every, found)
    torch.testing.assert_close(found, every.view(torch.float8_e4m3fn).float(), rtol=0, atol=0, equal_nan=True)


def test_a_tier_without_pages():
    case = Case(used=(0, 0))
    query, keys, values, _, used, *rest = case.arguments
    arguments = query, keys, values, torch.zeros(2, 0, dtype=torch.int32), used, *rest
    top, mass, mixed = reference.desparsify_attend(*arguments)
    assert bool((top == LOWEST).all() and (mass == 0).all() and (mixed == 0).all())
    near(joined(*triton.desparsify_attend(*arguments)), (top, mass, mixed))


UNSERVED = [
    Case(coefficients=4),
    Case(queries=triton.MOST_ROWS + 1),
    Case(used=(10,), dim=256, queries=33),
    Case(used=(10,), sparsity=triton.MOST_PAIRS + 1),
    Case(slots=8),
    Case(table=torch.bfloat16),
]


@pytest.mark.parametrize("case", UNSERVED, ids=str)
def test_what_the_kernel_does_not_serve_is_left_to_plain_torch(case, monkeypatch):
    monkeypatch.setenv("CALIB_KERNELS", "triton")
    assert not triton.supports(*case.arguments[:3])
    found = flat(desparsify_attend(*case.arguments))
    for mine, other in zip(found, reference.desparsify_attend(*case.arguments), strict=True):
        assert torch.equal(mine, other)


@pytest.mark.full
def test_runs_may_wait_to_be_joined(monkeypatch):
    """With `runs` the operation returns unmerged runs, for the launch that also attends exact tokens; else one merged part."""
    monkeypatch.setenv("CALIB_KERNELS", "triton")
    monkeypatch.setattr(triton, "PROGRAMS", 12)
    case = Case(used=(70, 20), slots=16, sparsity=1)
    waiting = desparsify_attend(*case.arguments, runs=True)
    assert waiting.runs == 5
    assert desparsify_attend(*case.arguments).runs == 1
    near(flat(whole(waiting)), reference.desparsify_attend(*case.arguments))
    near(flat(desparsify_attend(*case.arguments)), reference.desparsify_attend(*case.arguments))


def test_keys_of_several_vectors_are_left_to_plain_torch():
    _, keys, values, *_ = Case(chunks=2).arguments
    assert not triton.supports(torch.zeros(2, 1, 1, 32), values, keys)


@pytest.mark.parametrize("forced", ["triton", "reference"])
def test_the_operation_takes_the_form_that_is_asked_for(forced, monkeypatch):
    monkeypatch.setenv("CALIB_KERNELS", forced)
    asked = []
    launch = triton.desparsify_attend
    monkeypatch.setattr(triton, "desparsify_attend", lambda *given: asked.append(given) or launch(*given))
    case = Case(used=(20,))
    near(flat(desparsify_attend(*case.arguments)), reference.desparsify_attend(*case.arguments))
    assert len(asked) == (forced == "triton")


# --- against a real cache whose tokens are decoded, rotated to their positions and attended in float64 ---


def stored(tier: Tier, role: str, rows: range) -> SparsePages:
    """The operation's argument for the keys or values of a tier."""
    codec = tier.codec(role, rows)
    assert isinstance(codec, Sparse)
    form, tensors = codec.coefficients.form, tier.pool.tensors
    return SparsePages(
        tensors[f"{role}.indices"],
        tensors[f"{role}.coefficients"],
        codec.sparsity,
        codec.chunks,
        None if codec.offline is None else codec.offline.tensor,
        codec.online,
        form if isinstance(form, int) else None,
        tensors.get(f"{role}.scale"),
    )


SHORT = {"window": 8, "block": 4, "sparsity": 4}
SCENARIOS = [
    Scenario(SHORT),
    Scenario(SHORT | {"online": 40, "index": "int16"}, gqa=4),
    Scenario(SHORT | {"online": 40, "coefficients": "fp8"}, atoms=0),
    Scenario(SHORT | {"value_chunks": 4, "coefficients": 5}, atoms=100),
    Scenario(SHORT | {"coefficients": 2, "online": 30}, dtype=torch.bfloat16),
    Scenario(SHORT, data="huge"),
    Scenario({"tiers": [[16, 0.2], [4, 0.8]], "block": 20, "online": 20}),
    Scenario(
        SHORT,
        changes={
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
        },
    ),
]  # fmt: skip


@pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
def test_plain_torch_is_the_runtimes_own_way(scenario):
    cache, rows = scenario.open(), range(2)
    feed(cache, [scenario.tokens([90], 0), scenario.tokens([55], 1)])
    store = cache.compressed[1].store
    held = [store.counts(row) for row in rows]
    config = scenario.model.config
    groups = config.num_attention_heads // config.num_key_value_heads
    for number, tier in enumerate(store.tiers):
        used = [counts[number] for counts in held]
        if not max(used):
            continue
        keys, values = (stored(tier, role, rows) for role in ("keys", "values"))
        table = store.sequences.tables[number].numbers(torch.device("cpu"))
        query = torch.randn(2, config.num_key_value_heads, groups, config.head_dim) * config.head_dim**-0.5
        cos_sin = store.context.rotation.along(0, max(cache.sequences.lengths), query.device)
        positions = tier.pool.tensors.get(POSITIONS)
        counts = torch.tensor(used, dtype=torch.int32)
        arguments = (query, keys, values, table, counts, cos_sin, positions)
        top, mass, mixed = reference.desparsify_attend(*arguments)
        for row in rows:
            stored_keys, stored_values = (part.double() for part in store.decoded(row)[number])
            scores = query[row].double() @ stored_keys.mT
            largest = float(scores.abs().max())
            torch.testing.assert_close(
                (top + mass.log())[row].double(), scores.logsumexp(-1), rtol=0, atol=FLOAT32_ATTENTION * max(1, largest)
            )
            expected = scores.softmax(-1) @ stored_values
            error = ((mixed / mass[..., None])[row].double() - expected).abs().max()
            assert float(error) <= FLOAT32_ATTENTION * max(1, largest) * float(expected.abs().max())
