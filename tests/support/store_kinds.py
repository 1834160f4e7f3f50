"""The kinds of stores in the table of methods: the store's class, the codec, and shared parameters."""

from functools import cache

import torch
from cases import CASES, Case
from toy_models import random_model
from transformers import PreTrainedModel

from calib.runtime.offload.plan import OffloadPlan
from calib.runtime.offload.store import OffloadStore
from calib.runtime.store import Plan
from calib.runtime.tiered.plan import TieredPlan


@cache
def kinds() -> dict[str, str]:
    """The kind of every case, by its name: a text that describes the case's first layer.

    It has the class of the store (and of an offloaded cache's device store), the codec of the keys in the last tier, and where it
    applies "grouped" (tokens share parameters) and "on host".
    """
    model = random_model("llama")
    return {case.name: _kind(case, model) for case in CASES}


def _kind(case: Case, model: PreTrainedModel) -> str:
    layer = case.open(model).layers[0]
    shape = model.config.num_key_value_heads, 0, model.config.head_dim
    like = torch.zeros(1, *shape, device="meta")
    store = layer.plan.open(like, like, layer.sequences, layer.context)
    codec = _last_codec(layer.plan)
    stores = [store, store.low] if isinstance(store, OffloadStore) else [store]
    words = [*(type(each).__name__ for each in stores), type(codec).__name__]
    words += ["grouped"] if codec.token_group() > 1 else []
    return " ".join(words + (["on host"] if case.on_host else []))


def _last_codec(plan: Plan) -> object:
    """The codec of the keys: in an offloaded cache, of its device store; with tiers, of the last, which has most tokens."""
    if isinstance(plan, OffloadPlan):
        return _last_codec(plan.low)
    return (plan.tiers[-1] if isinstance(plan, TieredPlan) else plan).keys.codec
