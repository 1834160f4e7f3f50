"""Limits of some supported releases of transformers, found by trying the feature, not by the version number."""

import torch
from transformers.cache_utils import DynamicSlidingWindowLayer


def drafts_may_slide() -> bool:
    """Whether a draft model may have sliding-window layers: whether these return only their window while they record the past."""
    layer = DynamicSlidingWindowLayer(sliding_window=4)
    layer.activate_past_recording()
    for _ in range(8):
        keys, _ = layer.update(torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 1, 1))
    return keys.shape[2] == 4


NO_SLIDING_DRAFTS = "this release of transformers cannot draft with a model whose layers slide, whatever the cache"
