"""What rows that go through a model take beside its weights: their caches, one layer's activations, logits.

As for a fit (`calib/plan/peaks.py`, `cache_sizes.py`): stores and a layer run without numbers, and their bytes are counted.
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
LOGIT = 20  # bytes of a logit beside the model's dtype: float32, float64, and its logarithm


class RunMemory:
    """Bytes of one model's rows.

    Args:
        meta_model: the model.
        artifact: for rows that use one.
    """

    def __init__(self, meta_model: MetaModel, artifact: Artifact | None) -> None:
        self.meta_model, self.artifact = meta_model, artifact
        self._caches: dict[tuple[object, ...], CacheSize] = {}
        self._forwards: dict[tuple[int, int], int] = {}

    def cache(self, entry: CacheEntry, title: str, batch: int, prompt: int, after: int) -> CacheSize:
        """Of `batch` rows with a prompt and tokens after it; of quanto and hqq what their tokens take as they came."""
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
        """Keys and values of so many rows of so many tokens, all layers."""
        shape = self.meta_model.shape
        return 2 * batch * context * shape.layers * shape.kv_heads * shape.head_dim

    def forward(self, batch: int, tokens: int) -> int:
        """Of the activations while `batch` prompts of `tokens` go through a layer; attention never forms its matrix."""
        if (batch, tokens) not in self._forwards:
            model = self.meta_model.one_layer()
            with torch.no_grad(), MetaTensors() as memory, META:
                ids = torch.empty(batch, tokens, dtype=torch.int64)
                held = [
                    part.detach() for part in model.parameters()
                ]  # known from here on: a view of them is nothing new
                before = memory.most = memory.held
                stream(model, ids, torch.ones_like(ids, dtype=torch.bool), ids, lambda sample: None)
                del held
                self._forwards[batch, tokens] = memory.most - before
        return self._forwards[batch, tokens]

    def logits(self, positions: int, each: int = LOGIT) -> int:
        """Of the logits of so many positions in the model's dtype, and of what is made of them, `each` bytes a logit."""
        return positions * int(self.meta_model.text.vocab_size) * (self.meta_model.model.dtype.itemsize + each)

    def weights(self, products: str = "model") -> int:
        """Of the model; with products in float32 a 16-bit model's linear layers are there in float32 as well."""
        found = self.meta_model.weights
        if products == "float32":
            parts = (part.weight for part in self.meta_model.model.modules() if type(part) is nn.Linear)
            found += sum(FLOAT * weight.numel() for weight in parts if weight.dtype != torch.float32)
        return found


def at_most(entry: CacheEntry) -> bool:
    """Whether a row's size is the most that it may be, and not what it will be."""
    return isinstance(entry, PeerEntry) and entry.peer not in ("dynamic", "offloaded")


def placed(device: int, host: int, on_gpu: bool) -> dict[str, int]:
    """Bytes of both; without a GPU all of it is the host's."""
    return {"device": device, "host": host} if on_gpu else {"device": 0, "host": device + host}
