"""Attention mass that probe queries of decode steps give to the exact window: the launch that sums it adds it to the slots."""

from dataclasses import dataclass, replace

import pytest
import torch
from launches import alone, watch
from layer_walk import Tokens, feed
from tolerances import FLOAT32_ATTENTION
from toy_models import random_model

from calib.runtime import compress, methods
from calib.runtime.attend import attention_stats
from calib.runtime.methods.zipcache import ZipCache
from calib.runtime.tiered.chunks import ChunkStore

pytestmark = pytest.mark.arithmetic

BLOCK, STEPS = 10, 12


@dataclass(frozen=True)
class BehindSinks(ZipCache):
    """ZipCache with sinks."""

    sinks: int = 3

    def plan(self, *asked):
        plan = super().plan(*asked)
        return replace(plan, tiering=replace(plan.tiering, sinks=self.sinks))


def probabilities(store, row: int, tokens: Tokens) -> torch.Tensor:
    """Attention probabilities of the window's tokens and the new one, summed over the query heads of each KV head: float64
    `[kv_heads, exact + 1]`."""
    exact = store.sequences.exact(row, store.sequences.lengths[row])
    held = [keys for keys, _ in store.decoded(row)]
    keys = torch.cat([*held, store.windows[0].tokens[row, :, :exact], tokens.keys[0]], 1).double()
    query = tokens.queries[0].double().unflatten(0, (len(keys), -1))[:, :, 0]
    shares = (query @ keys.mT * keys.shape[2] ** -0.5).softmax(-1).sum(1)
    return shares[:, -exact - 1 :]


@pytest.mark.parametrize("form", ["reference", "triton"])
@pytest.mark.parametrize("at_once", [8, 2], ids=["a tile", "tiles of two rows"])
@pytest.mark.parametrize("lengths", [[15, 15], [4, 17, 12, 12, 2]], ids=["level rows", "ragged rows"])
@pytest.mark.parametrize("sinks", [0, 3])
def test_mass_behind_a_step_is_that_before_and_its_probabilities(form, at_once, lengths, sinks, monkeypatch):
    """Any row may be a probe in any step. A step that completes a row's chunk encodes its mass with the tokens; for all rows that
    are attended together with that row mass is then returned, and added outside the launch."""
    monkeypatch.setenv("CALIB_KERNELS", form)
    alone(monkeypatch, *["probability_mass"] * (form == "triton"))
    monkeypatch.setattr("calib.runtime.layer.TILE_TOKENS", at_once)
    monkeypatch.setattr("calib.runtime.layer.PAGE_TOKENS", 1)
    monkeypatch.setitem(methods.METHODS, "behind sinks", BehindSinks)
    launched, added, of = watch(monkeypatch, "probability_mass"), [], attention_stats.AttentionStats.of
    draw, probes = torch.Generator().manual_seed(7), {}

    def stats(*asked):
        found = of(*asked)
        added.append(found is None)
        return found

    monkeypatch.setattr(attention_stats.AttentionStats, "of", staticmethod(stats))
    monkeypatch.setattr(ChunkStore, "_probes_of_step", lambda store, step, rows: [probes[row] for row in rows])
    model = random_model("llama", num_hidden_layers=1)
    method, options = ("behind sinks", {"refresh": False, "sinks": sinks}) if sinks else ("zipcache", {})
    with compress(model, method, recompress=BLOCK, **options) as cache:
        feed(cache, [Tokens.random(model, length, row) for row, length in enumerate(lengths)])
        store, checked, ended = cache.compressed[0].store, 0, 0
        for step in range(STEPS):
            brought = [Tokens.random(model, 1, 100 * step + row) for row in range(len(lengths))]
            for row in range(len(lengths)):  # in the first step all rows are probes, in the second none
                probes[row] = bytes([step == 0 or (step > 1 and int(torch.randint(0, 3, (1,), generator=draw)) > 0)])
            held, before = list(store.sequences.lengths), store.mass.clone()
            exact = [store.sequences.exact(row, n) for row, n in enumerate(held)]
            shares = [probabilities(store, row, brought[row]) for row in range(len(held))]
            feed(cache, brought)
            for row, (n, own) in enumerate(zip(exact, shares, strict=True)):
                if store.sequences.exact(row, held[row] + 1) <= n:
                    assert not store.mass[row, :, sinks:].any()
                    ended += 1
                    continue
                expected, met = before[row].double(), torch.zeros(before.shape[2], dtype=torch.bool)
                if probes[row][0]:
                    met[sinks:n] = met[n] = True
                    expected[:, met] += own[:, met[: n + 1]]
                    checked += 1
                assert (store.mass[row].double() - expected).abs().max() <= 8 * FLOAT32_ATTENTION
                assert torch.equal(store.mass[row][:, ~met], before[row][:, ~met])
    assert checked > STEPS // 2 and ended and any(added)
    assert any(launch.arguments["ADDED"] for launch in launched) == (form == "triton")
