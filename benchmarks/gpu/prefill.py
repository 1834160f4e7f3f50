"""Times what a method adds to a whole prefill: scoring, choosing, encoding, packing, and all in between."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from transformers import DynamicCache, LlamaForCausalLM

from benchmarks.gpu.agreement import agree
from benchmarks.gpu.bench import Bench, Measured
from benchmarks.gpu.launches import supported
from benchmarks.gpu.model import SAID, ids_of, model_of
from benchmarks.gpu.turns import in_turns
from calib.runtime import compress

# Largest relative distance of the last token's logits: in every method attention over a prompt is exact, by the same flash kernel.
EXACT = 2**-6


def zipcache(bench: Bench) -> Measured:
    """Measures ZipCache: scored by probes, two tiers."""
    return measured(bench, "zipcache", ("probe_saliency", "quantise"))


def mikv(bench: Bench) -> Measured:
    """Measures MiKV: scored by all query rows."""
    return measured(bench, "mikv", ("probe_saliency", "quantise"))


def kivi(bench: Bench) -> Measured:
    """Measures KIVI: not scored."""
    return measured(bench, "kivi", ("quantise",))


@torch.no_grad()
def measured(bench: Bench, method: str, operations: tuple[str, ...]) -> Measured:
    """Returns the figure "overhead": the additional time of a prompt, as a share of that with DynamicCache."""
    bench.needs_kernel(*operations)
    model = model_of(bench)
    ids = ids_of(bench, 1, bench.sizes.prompt)
    expected = prefill(model, ids, None)
    with supported(bench, *operations) as launched:
        found = prefill(model, ids, method)
    apart = agree("the logits of the prompt's last token", found, expected, EXACT)
    calls: dict[str, Callable[[], object]] = {
        "ours": partial(prefill, model, ids, method),
        "DynamicCache": partial(prefill, model, ids, None),
        "DynamicCache again": partial(prefill, model, ids, None),
    }
    pairs = {"ours": ("ours", "DynamicCache"), "A/A": ("DynamicCache again", "DynamicCache")}
    timed = in_turns(bench, calls, pairs)
    overhead = [value - 1 for value in timed["ratios"]["ours"]]
    details = {"model": SAID, "method": method, "tokens": bench.sizes.prompt, "distance_to_reference": apart}
    return Measured({"overhead": overhead}, {**details, "kernels_launched": sorted(launched), **timed})


def prefill(model: LlamaForCausalLM, ids: Tensor, method: str | None) -> Tensor:
    """Runs a prompt with a fresh cache of `method` (None: DynamicCache); returns the logits after it."""
    if method is None:
        return model(ids, past_key_values=DynamicCache(config=model.config), logits_to_keep=1).logits
    with compress(model, method) as cache:
        return model(ids, past_key_values=cache, logits_to_keep=1).logits
