"""Measures what a method adds to a prefill on the CPU: seconds, and the additional memory of scoring.

    python -m benchmarks.prefill_cpu [--model wide] [--tokens 4096] [--write]

Seconds: one process, two threads; the same random prompt with each cache in every turn, in another order each turn; medians and
quartiles of the ratios to transformers' DynamicCache within turns, beside an A/A pair. "scored by all rows": every query row is a
probe, as in H2O, whose importance is the sum over all queries.

Memory: the peak bytes of scoring beside its inputs, in `kernels/probe_saliency` for one layer of a model with 8 KV heads of 128 and
32 query heads; the whole T x T matrix would take 32 x 4 x T^2 bytes.
"""

import argparse
import random
import time
import weakref
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, PreTrainedModel

from benchmarks.protocol import keep, load, quartiles
from calib.kernels.probe_saliency.reference import attention_mass
from calib.runtime import compress

RESULT = "prefill_cpu.json"
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "zipcache": ("zipcache", {}),
    "zipcache, scored by all rows": ("zipcache", {"probes": "all"}),
    "h2o, scored by all rows": ("h2o", {}),
    "mikv, scored by all rows": ("mikv", {}),
    "mikv, normalised": ("mikv", {"policy": "normalised"}),
    "mikv, local": ("mikv", {"policy": "local"}),
    "mikv, fastgen": ("mikv", {"policy": "fastgen"}),
    "kivi, not scored": ("kivi", {"residual": 32}),
    "full, not scored": ("full", {}),
}


@torch.no_grad()
def prefill(model: PreTrainedModel, ids: Tensor, method: str | None) -> float:
    """Returns the seconds of one prompt with a new cache of `method`; None: DynamicCache."""
    if method is None:
        cache = DynamicCache(config=model.config)
        start = time.perf_counter()
        model(ids, past_key_values=cache, logits_to_keep=1)
        return time.perf_counter() - start
    name, options = METHODS[method]
    with compress(model, name, **options) as cache:
        start = time.perf_counter()
        model(ids, past_key_values=cache, logits_to_keep=1)
        return time.perf_counter() - start


def measure(model: PreTrainedModel, tokens: int, turns: int) -> dict[str, Any]:
    """Returns the ratios of every method's time to DynamicCache's."""
    ids = torch.randint(3, model.config.vocab_size, (1, tokens), generator=torch.Generator().manual_seed(0))
    names: list[str | None] = [None, None, *METHODS]
    ratios: dict[str, list[float]] = {"dynamic again": [], **{name: [] for name in METHODS}}
    plain, shuffled = [], random.Random(0)
    for method in names:  # warm-up
        prefill(model, ids, method)
    for _ in range(turns):
        seconds = {
            position: prefill(model, ids, names[position])
            for position in shuffled.sample(range(len(names)), len(names))
        }
        plain.append(seconds[0])
        for position, name in enumerate(["dynamic again", *METHODS], start=1):
            ratios[name].append(seconds[position] / seconds[0])
    return {
        "tokens": tokens,
        "dynamic_seconds": quartiles(plain),
        "time_ratio": {name: quartiles(values) for name, values in ratios.items()},
    }


class Peak(TorchDispatchMode):
    """Mode that records the peak bytes of new storage alive at once inside `with`, as `most`."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.most = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {part.untyped_storage()._cdata for part in args if isinstance(part, Tensor)}
        result = func(*args, **(kwargs or {}))
        for made in result if isinstance(result, tuple | list) else (result,):
            if isinstance(made, Tensor) and made.untyped_storage()._cdata not in self.known | given:
                storage = made.untyped_storage()
                self.known.add(storage._cdata)
                self.live += storage.nbytes()
                weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())
        self.most = max(self.most, self.live)
        return result

    def _gone(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.live -= size


def scoring_memory(tokens: int, share: float, dtype: torch.dtype) -> dict[str, object]:
    """Returns the peak bytes of scoring with the last `share` of a prompt's rows."""
    draw = torch.Generator().manual_seed(0)
    query, keys = (torch.randn(1, heads, tokens, 128, generator=draw).to(dtype) for heads in (32, 8))
    probes = torch.arange(tokens - int(share * tokens), tokens)
    asked = query[:, :, probes]
    with Peak() as peak:
        attention_mass(asked, keys, probes, 128**-0.5)
    return {"tokens": tokens, "probe_share": share, "dtype": str(dtype), "peak_bytes": peak.most}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", default=["artifacts/tiny-llama", "wide"])
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096])
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--write", action="store_true", help=f"write {RESULT} beside the other runs")
    asked = parser.parse_args()
    torch.set_num_threads(2)
    rows = []
    for name in asked.model:
        model = load(name)
        for tokens in asked.tokens:
            rows.append({"model": Path(name).name, **measure(model, tokens, asked.turns)})
            ratios = ", ".join(
                f"{method} {ratio[1]:.2f} [{ratio[0]:.2f}, {ratio[2]:.2f}]"
                for method, ratio in rows[-1]["time_ratio"].items()
            )
            print(f"{rows[-1]['model']}, {tokens} tokens, seconds / DynamicCache: {ratios}", flush=True)
    memory = [
        scoring_memory(tokens, share, dtype)
        for dtype in (torch.float32, torch.bfloat16)
        for share in (0.1, 1.0)
        for tokens in (2048, 4096, 8192)
    ]
    for row in memory:
        print(
            f"scoring {row['probe_share']:.0%} of {row['tokens']} rows in {row['dtype']}: {row['peak_bytes'] / 2**20:.1f} MiB"
        )
    if asked.write:
        keep(RESULT, {"prefill": rows, "scoring": memory})


if __name__ == "__main__":
    main()
