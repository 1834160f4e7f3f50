"""A decode step of a budget of heavy hitters (H2O): the interpreted kernels and plain torch against loops over heads and slots."""

import pytest
import torch
from launches import counts, watch

from calib.kernels.heavy_hitters.operation import BudgetSlots, MassRule, NewToken, enter_ring

pytestmark = pytest.mark.arithmetic

PAGE, HEADS = 4, 3
RULES = {
    "sum": MassRule(),
    "newest": MassRule(adds_up=False),
    "limited": MassRule(limit=1.5),
    "mean": MassRule(mean=True),
    "unscored": None,
}


class Budget:
    """Three rows: in one a slot is free, in the others heavy tokens compete. Masses have few values, so that many are equal."""

    def __init__(self, rule, rows=3, slots=12, seed=0):
        generator = torch.Generator().manual_seed(seed)

        def drawn(*shape, most=4):
            return torch.randint(0, most, shape, generator=generator)

        self.rule, pages = rule, rows * slots // PAGE + 2
        numbers = 0 if rule is None else 1 + rule.mean
        self.mass = drawn(rows, numbers * HEADS, slots).float() / 2
        self.shown, self.fresh = drawn(rows, numbers * HEADS, slots - 1) / 2, drawn(rows, numbers * HEADS, 1) / 2
        table = torch.randperm(pages, generator=generator)[: rows * slots // PAGE].view(rows, -1).int()
        positions = torch.stack([torch.randperm(pages * PAGE, generator=generator) for _ in range(HEADS)])
        positions = positions.view(HEADS, pages, PAGE).transpose(0, 1).contiguous().int()[..., None]
        ring, free = torch.tensor([2, 0, 1][:rows]), torch.tensor([2, 7, 1][:rows])
        first, last = torch.tensor([3, 0, 5][:rows]), torch.tensor([11, 0, 9][:rows])
        self.slots = BudgetSlots(ring, free, first, last, table, positions)
        fields = [torch.randn(pages, HEADS, PAGE, 5, generator=generator), drawn(pages, HEADS, PAGE, 1).short()]
        new = [
            torch.randn(rows, HEADS, 1, 5, generator=generator),
            drawn(rows, 1, 1, 1).short().expand(-1, HEADS, 1, 1),
        ]
        held = torch.full((rows, HEADS, 1, 1), 9999, dtype=torch.int32)
        self.tokens = [NewToken(*one) for one in zip([*fields, positions], [*new, held], strict=True)]

    def by_loops(self):
        """Compute the updated mass and fields, and the removed tokens, with loops over heads."""
        mass, fields = self.mass.clone(), [one.into.clone() for one in self.tokens]
        lost = [torch.zeros(one.token.shape, dtype=one.into.dtype) for one in self.tokens]
        for row, (ring, free, first, last) in enumerate(zip(*(part.tolist() for part in self.slots[:4]), strict=True)):
            for head in range(HEADS):
                target, numbers = free, range(head, self.mass.shape[1], HEADS)
                if self.rule is not None:
                    for number in numbers:
                        for slot in range(self.shown.shape[2]):
                            had, more = mass[row, number, slot].item(), self.shown[row, number, slot].item()
                            now = had + more if self.rule.adds_up else more
                            mass[row, number, slot] = now if self.rule.limit is None else min(now, self.rule.limit)
                    own = mass[row, head]
                    if self.rule.mean:
                        seen = mass[row, HEADS + head]
                        own = torch.tensor([m / max(1, n) if n else 0 for m, n in zip(own, seen, strict=True)])
                    order = sorted(
                        range(first, last), key=lambda slot: (own[slot].item(), -self.position(row, head, slot))
                    )
                    if order and own[ring] > own[order[0]]:
                        target = order[0]
                    for number in numbers:
                        mass[row, number, target] = mass[row, number, ring].item()
                        mass[row, number, ring] = self.fresh[row, number, 0]
                at, to = self.at(row, head, ring), self.at(row, head, target)
                for field, gone, one in zip(fields, lost, self.tokens, strict=True):
                    gone[row, head, 0] = field[to]
                    field[to] = field[at].clone()
                    field[at] = one.token[row, head, 0]
        return mass, fields, lost

    def at(self, row, head, slot):
        return int(self.slots.table[row, slot // PAGE]), head, slot % PAGE

    def position(self, row, head, slot):
        return int(self.slots.positions[self.at(row, head, slot)])


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("form", ["reference", "triton"])
def test_the_lightest_loses(form, name, seed, monkeypatch):
    """The removed token is the heavy one with the lowest score (of equal ones the newest); the token that leaves the ring, if its
    score is no higher; none, if a slot is free."""
    monkeypatch.setenv("CALIB_KERNELS", form)
    asked = Budget(RULES[name], seed=seed)
    mass, fields, lost = asked.by_loops()
    launched = watch(monkeypatch, "heavy_hitters")
    found = enter_ring(asked.rule, asked.mass, asked.shown, asked.fresh, asked.slots, asked.tokens)
    assert counts(launched) == ({"choose": 1, "move": 1} if form == "triton" else {})
    assert torch.equal(asked.mass, mass)
    for one, field, gone, own in zip(asked.tokens, fields, lost, found, strict=True):
        assert torch.equal(one.into, field) and torch.equal(own, gone) and own.dtype == one.into.dtype


@pytest.mark.full
def test_a_row_of_a_batch_as_alone(monkeypatch):
    """A row has the same masses alone and in a batch, with more slots than a program reads in one turn."""
    monkeypatch.setenv("CALIB_KERNELS", "triton")
    together, alone = Budget(RULES["mean"], slots=2500 // PAGE * PAGE), Budget(RULES["mean"], slots=2500 // PAGE * PAGE)
    together.slots.last[0] = alone.slots.last[0] = 2490
    for part in (together.mass, together.shown):  # the lightest token, slot 2480, is read in the last turn
        part[0, :HEADS] += 1
        part[0, :HEADS, 2480] = 0
    alone.mass, alone.shown = together.mass.clone(), together.shown.clone()
    expected = together.by_loops()[0]
    enter_ring(together.rule, together.mass, together.shown, together.fresh, together.slots, together.tokens)
    assert torch.equal(together.mass, expected)
    own = BudgetSlots(*(part[:1] for part in alone.slots[:5]), alone.slots.positions)
    enter_ring(
        alone.rule, alone.mass[:1], alone.shown[:1], alone.fresh[:1], own, [NewToken(i, t[:1]) for i, t in alone.tokens]
    )
    assert torch.equal(alone.mass[:1], together.mass[:1])


def test_a_field_of_another_type_goes_by_plain_torch(monkeypatch):
    monkeypatch.setenv("CALIB_KERNELS", "triton")
    asked = Budget(RULES["sum"])
    mass, fields, _ = asked.by_loops()
    asked.tokens[0] = asked.tokens[0]._replace(token=asked.tokens[0].token.double())
    launched = watch(monkeypatch, "heavy_hitters")
    enter_ring(asked.rule, asked.mass, asked.shown, asked.fresh, asked.slots, asked.tokens)
    assert not launched and torch.equal(asked.mass, mass) and torch.equal(asked.tokens[0].into, fields[0])
