"""What a cache should hold: everything it was given, kept exactly by a cache of transformers that is told the same things.

The shadow starts from what the cache holds, so it cannot see that a row holds another row's tokens, or a draft that was
taken back. The mirror can: each token of a row, encoded by the method's own stages in one piece, must be what is held.
That is also the promise that neither batch, padding, chunks nor drafts leave a trace in what is stored.
"""

from typing import Any

import oracle
import torch
from tolerances import STORED
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from calib.runtime.cache import CompressedCache


class Mirror:
    """Listens to a compressed cache from its first token on."""

    def __init__(self, cache: CompressedCache) -> None:
        self.cache, self.exact = cache, DynamicCache()
        self.exact.layers = [DynamicLayer() for _ in cache.compressed]
        for layer, own in zip(cache.compressed, self.exact.layers, strict=True):
            listen(layer, "update", own.update)
        listen(cache, "reorder_cache", self.exact.reorder_cache)
        listen(cache, "crop", self.exact.crop)

    def check(self, mask: Tensor | None) -> None:
        """Refuses a cache that holds anything else; `mask [rows, columns]` is the padding mask of its last forward."""
        lengths, sliding = self.cache.rows.lengths, self.cache.rows.sliding
        for number, (layer, given) in enumerate(zip(self.cache.compressed, self.exact.layers, strict=True)):
            for stream, tokens in zip(layer.store.streams, (given.keys, given.values), strict=True):
                real = torch.ones(tokens.shape[0], tokens.shape[2]) if mask is None else mask[:, : tokens.shape[2]]
                assert real.sum(1).tolist() == lengths, f"rows of {lengths} tokens, given {real.sum(1).tolist()}"
                for row, length in enumerate(lengths):
                    expected = stored(stream, tokens[row : row + 1, :, real[row].bool()])[0]
                    found = oracle.held_tokens(layer, stream, row)
                    kept = slice(0 if sliding is None else max(0, length - sliding + 1), None)
                    off = (found - expected)[:, kept].abs().amax((0, 2))
                    odd = (off > STORED * expected.abs().max()).nonzero()[:, 0].tolist()
                    assert not odd, f"layer {number}, {stream.role}, row {row}: the tokens {odd} are not those given"


def stored(stream: Any, tokens: Tensor) -> Tensor:
    """What a stream should hold of `tokens [1, kv_heads, T, head_dim]`: those that are encoded as they decode, float64."""
    codec, transform = stream.plan.codec, stream.plan.transform
    packed = stream.plan.schedule.packed(tokens.shape[2])
    block = codec.encode(transform.forward(tokens[:, :, :packed]), stream.wide)
    decoded = transform.inverse(codec.decode(block, tokens.shape[3]))
    return torch.cat([decoded.double(), tokens[:, :, packed:].double()], 2)


def listen(told: Any, name: str, also: Any) -> None:
    """From now on `also` is called with whatever the method `name` of `told` is called with."""
    original = getattr(told, name)

    def both(*arguments: Any, **options: Any) -> Any:
        also(*arguments, **options)
        return original(*arguments, **options)

    setattr(told, name, both)
