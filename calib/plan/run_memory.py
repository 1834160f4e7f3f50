"""The memory that rows of a batch need in addition to the model's weights: their caches, one layer's activations, logits.

As in `peaks.py` and `cache_sizes.py`, stores and one layer are run on the `meta` device and their bytes are counted.
"""

import torch
from torch import nn

from calib.capture.capture import stream
from calib.evaluate.entries import CacheEntry, MethodEntry, PeerEntry
from calib.plan.cache_sizes import CacheSize, cache_size, exact_bytes
from calib.plan.meta_model import MetaModel
from calib.plan.meta_tensors import META, MetaTensors
from calib.runtime.artifact.artifact import Artifact
from calib.runtime.files import canonical_json

FLOAT = 4
LOGIT = 20  # bytes of a logit in addition to the model's dtype: float32, float64, and its logarithm in float64


class RunMemory:
    """Predicts the bytes that an evaluation or a bench of one model needs.

    Args:
        meta_model: the model.
        artifact: the artifact for rows that use one.
    """

    def __init__(self, meta_model: MetaModel, artifact: Artifact | None) -> None:
        self.meta_model, self.artifact = meta_model, artifact
        self._caches: dict[tuple[object, ...], CacheSize] = {}
        self._forwards: dict[tuple[int, int], int] = {}

    def cache(self, entry: CacheEntry, title: str, batch: int, prompt: int, after: int) -> CacheSize:
        """Size of the cache of `batch` rows with a prompt and `after` tokens after it.

        Quanto and HQQ caches of transformers are counted as an exact cache, which is an upper bound.
        """
        if isinstance(entry, MethodEntry):
            options = entry.options_for(title)
            key = (entry.name, canonical_json.dumps(options), entry.uses_artifact, batch, prompt, after)
            if key not in self._caches:
                artifact = self.artifact if entry.uses_artifact else None
                self._caches[key] = cache_size(self.meta_model, entry.name, options, artifact, batch, prompt, after)
            return self._caches[key]
        layers = self.meta_model.shape.layers
        exact = exact_bytes(self.meta_model, range(layers), batch, prompt + after)
        if isinstance(entry, PeerEntry) and entry.peer == "offloaded":
            return CacheSize(2 * exact // layers, exact)  # a layer, and the next one while it is fetched
        return CacheSize(exact)

    def values(self, batch: int, context: int) -> int:
        """Number of key and value elements of `batch` rows of `context` tokens, all layers."""
        shape = self.meta_model.shape
        return 2 * batch * context * shape.layers * shape.kv_heads * shape.head_dim

    def forward(self, batch: int, tokens: int) -> int:
        """Peak bytes of activations while `batch` prompts of `tokens` go through a layer; no attention matrix is allocated."""
        if (batch, tokens) not in self._forwards:
            model = self.meta_model.one_layer()
            with torch.no_grad(), MetaTensors() as memory, META:
                ids = torch.empty(batch, tokens, dtype=torch.int64)
                held = [
                    part.detach() for part in model.parameters()
                ]  # registered now, so that views of them are not counted later
                before = memory.most = memory.held
                stream(model, ids, torch.ones_like(ids, dtype=torch.bool), ids, lambda sample: None)
                del held
                self._forwards[batch, tokens] = memory.most - before
        return self._forwards[batch, tokens]

    def logits(self, positions: int, each: int = LOGIT) -> int:
        """Bytes of the logits of `positions` positions in the model's dtype, plus `each` bytes a logit for tensors made of them."""
        return positions * int(self.meta_model.text.vocab_size) * (self.meta_model.model.dtype.itemsize + each)

    def weights(self, products: str = "model") -> int:
        """Bytes of the weights; `products` "float32" adds a float32 copy of a 16-bit model's linear layers."""
        found = self.meta_model.weights
        if products == "float32":
            parts = (part.weight for part in self.meta_model.model.modules() if type(part) is nn.Linear)
            found += sum(FLOAT * weight.numel() for weight in parts if weight.dtype != torch.float32)
        return found


def at_most(entry: CacheEntry) -> bool:
    """Whether the predicted size of a row's cache is only an upper bound."""
    return isinstance(entry, PeerEntry) and entry.peer not in ("dynamic", "offloaded")


def placed(device: int, host: int, on_gpu: bool) -> dict[str, int]:
    """Bytes on the device and in host memory; without a GPU all of them are in host memory."""
    return {"device": device, "host": host} if on_gpu else {"device": 0, "host": device + host}
