"""The loss curve of `klt`: the KL divergence on held-out text at several budgets, and the errors predicted for them.

Tensor: `klt.before.loss`, or `klt.loss` with components of keys after RoPE: float32 `[budgets, 2]`, the predicted error and the
measured KL in nats per token. The option `loss` of `klt` finds its bit allocation by interpolating this curve.
"""

from collections.abc import Sequence
from contextlib import ExitStack

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from calib.capture.capture import capturing
from calib.capture.device_map import entry_device
from calib.capture.gradients import ANSWER
from calib.capture.sample import LayerSample
from calib.runtime import cache_argument
from calib.runtime.artifact.artifact import Artifact
from calib.runtime.artifact.components import allocator, coding_of
from calib.runtime.artifact.transform_tensors import LOSSES
from calib.runtime.compress import compress
from calib.runtime.layer import CompressedLayer
from calib.runtime.logits import Logits

BITS = (4.0, 3.0, 2.0, 1.5, 1.0, 0.75)
SEQUENCES = 16


@torch.no_grad()
def loss_curve(
    model: PreTrainedModel,
    artifact: Artifact,
    tokens: Tensor,
    bits: Sequence[float] = BITS,
    sequences: int = SEQUENCES,
    rope: str | None = None,
) -> dict[str, Tensor]:
    """Returns the curve as a tensor under its name in the artifact; both columns increase.

    The loss is that of the predictions at the last quarter of each sequence, after a prefix whose tokens are coded except
    the first ones. The prefix is computed once, exactly, and its keys and values are stored in the caches of all budgets.

    Args:
        model: the model that the artifact was fitted on.
        artifact: with bases, steps and errors of `klt`.
        tokens: int64 `[n, length]`, of which the first `sequences` rows are used.
        bits: budgets in bits per value, decreasing; those below the least that `klt` can spend are left out.
        sequences: rows of `tokens` to use.
        rope: components of keys "before" RoPE or "after" it; None: the default of `klt` for this artifact.

    Raises ValueError if the model cannot be compressed.
    """
    tokens = tokens[:sequences].to(entry_device(model))
    coding = coding_of(artifact, rope)
    prefix, rope = tokens.shape[1] - tokens.shape[1] // ANSWER, coding.rope
    budgets = allocator(artifact, coding)
    told = [budget for budget in bits if budget >= budgets.least_bits]  # heads of few channels cannot go lower
    losses = dict.fromkeys(told, 0.0)
    with ExitStack() as opened:
        options = {"artifact": artifact, "rope": rope, "size": False, "predict": False, "window": 0}
        caches = {budget: opened.enter_context(compress(model, "klt", bits=budget, **options)) for budget in told}
        for row in tokens:  # one at a time: logits over a large vocabulary take much memory
            for cache in caches.values():
                cache.reset()
            said = exact_answers(model, row, prefix, list(caches.values()))
            for budget, cache in caches.items():
                losses[budget] += divergence(model, row[prefix:], cache, said)
    found = [(budgets.at_bits(budget).error, max(0.0, loss / len(tokens))) for budget, loss in losses.items()]
    return {LOSSES[rope]: torch.tensor(sorted(found), dtype=torch.float32).cummax(0).values}


def divergence(model: PreTrainedModel, answer: Tensor, cache: Cache, said: Tensor) -> float:
    """Returns the mean KL in nats per token between the exact predictions at `answer [tokens]` and those with this cache.

    Args:
        answer: int64 `[tokens]`, which follow the tokens in the cache.
        cache: holds the tokens before; the answer's are added.
        said: exact log-probabilities, as `exact_answers` returns them.
    """
    coded = model(answer[None], **{cache_argument.NAME: cache}).logits[0].float().log_softmax(-1)
    return float((said.exp() * (said - coded)).sum(-1).mean())


def exact_answers(model: PreTrainedModel, row: Tensor, prefix: int, caches: Sequence[Cache]) -> Tensor:
    """Returns the exact log-probabilities predicted at each token from `prefix` on: float32 `[tokens - prefix, vocabulary]`.

    The first `prefix` tokens are also stored in the `caches`, which must be empty.
    """

    def store(sample: LayerSample) -> None:
        query, keys, values = (part[:, :, :prefix] for part in (sample.queries, sample.keys, sample.values))
        logits = Logits(sample.scaling, sample.softcap, sample.window)
        for cache in caches:
            layer, _ = cache.update(keys, values, sample.layer)
            if isinstance(layer, CompressedLayer):
                layer.attend(query, None, logits)

    order = torch.arange(len(row), device=row.device)[None]
    with capturing(model, torch.ones_like(order, dtype=torch.bool), order, order, store):
        whole = model(row[None], use_cache=False, logits_to_keep=len(row) - prefix).logits[0, prefix - len(row) :]
    return whole.float().log_softmax(-1)
