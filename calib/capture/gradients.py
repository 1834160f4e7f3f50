"""How a model's predictions depend on its keys and values: derivatives of the log-probabilities of tokens drawn from the model.

A sequence's first three quarters stand for a prompt that a cache holds, its last quarter for the answer. At every position of
the last quarter a next token is drawn from the model (teacher-forced, so nothing is generated), and the sum of these tokens'
log-probabilities is differentiated by the keys and values of the first three quarters. Keys and values that a cache keeps
exact have no derivatives: those of the last quarter, and of the sequence's first tokens.

E[g g^T] over draws is the Fisher information of the answer, so no reference answer is needed.
"""

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from calib.capture.capture import capturing
from calib.capture.device_map import entry_device
from calib.capture.sample import SINKS, LayerSample, Sink
from calib.documents.generators import keyed_random
from calib.errors import RunError
from calib.runtime.messages.dtype_name import dtype_name

ANSWER = 4  # the answer is the last 1/4 of a sequence


class NotDifferentiableError(RunError):
    """The model cannot be differentiated by its keys and values; the message gives the reason."""


def stream_gradients(
    model: PreTrainedModel,
    tokens: Tensor,
    mask: Tensor,
    index: Tensor,
    seed: int,
    sink: Sink,
    begins: Tensor | None = None,
) -> list[str]:
    """Runs a forward and a backward pass for each sequence, then calls `sink` once for each attention layer.

    In the samples, `keys` and `values` are derivatives, `taken_at` has the keys and values themselves, and `mask` is True for
    tokens with derivatives. Every sequence has the same weight: its derivatives are divided by the square root of the sum over
    layers, heads and both streams of sum_t g_t^T C g_t, with C the covariance of the sequence's keys or values, which is the
    predicted cost of losing all of them. Otherwise documents whose answers depend on few tokens would outweigh running text.

    Sequences are run one at a time, as a backward pass needs the activations of all layers. No parameter gets a gradient.
    Sequences of fewer than 8 tokens are left out.

    Args:
        model: a causal language model that uses transformers' AttentionInterface.
        tokens: int64 `[batch, tokens]`; this and the other tensors may be on any device.
        mask: bool `[batch, tokens]`, True for real tokens.
        index: int64 `[batch, tokens]`, the tokens' numbers in the corpus.
        seed: of the draws, which depend only on it and on the first token's number in the corpus.
        sink: called with each layer's sample; must not keep it.
        begins: int64 `[batch]`, the position of each row's first token; None: 0.

    Returns:
        A reason for each sequence without derivatives: no backward pass (quantised weights, out of memory), or an overflow.

    Raises RunError as `calib.capture.capture.stream` does.
    """
    refused = []
    for row, real in enumerate(mask):
        length = int(real.sum())
        if length < 2 * SINKS:
            continue
        numbers = index[row, real]
        draw = keyed_random("sensitivity", seed, int(numbers[0]))
        try:
            begin = 0 if begins is None else int(begins[row])
            found = normalised(derivatives(model, tokens[row : row + 1, real], numbers[None], draw.random, begin))
        except NotDifferentiableError as error:
            refused.append(str(error))
            continue
        for sample in found:
            sink(sample)
    return refused


def derivatives(
    model: PreTrainedModel, tokens: Tensor, index: Tensor, draw: Callable[[], float], begin: int = 0
) -> list[tuple[LayerSample, LayerSample]]:
    """Returns for each layer the sample of one sequence, and the same sample with derivatives as keys and values.

    Args:
        model: as in `stream_gradients`.
        tokens, index: int64 `[1, tokens]`, without padding.
        draw: returns uniform numbers in [0, 1).
        begin: position of the first token.

    Raises NotDifferentiableError if there is no backward pass.
    """
    device, length = entry_device(model), tokens.shape[1]
    prefix = length - length // ANSWER
    tokens, index = tokens.to(device), index.to(device)
    positions = torch.arange(begin, begin + length, device=device)[None]
    samples: list[LayerSample] = []
    real = torch.ones_like(tokens, dtype=torch.bool)
    with torch.enable_grad(), capturing(model, real, positions, index, samples.append):
        try:
            embedded = model.get_input_embeddings()(tokens).detach().requires_grad_()
            found = model(
                inputs_embeds=embedded, position_ids=positions, use_cache=False, logits_to_keep=length - prefix
            ).logits
            said = found[0, prefix - length :].float().log_softmax(-1)
            by = [x for sample in samples for x in (sample.keys, sample.values)]
            chosen = drawn(said.detach(), draw)
            gradients = torch.autograd.grad(said.gather(-1, chosen).sum(), by, allow_unused=True)
        except RuntimeError as error:  # out of memory, or an operation without a derivative
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise NotDifferentiableError(f"{type(model).__name__} has no backward pass here ({reason})") from error
    by_layer = [torch.zeros_like(x) if g is None else g for x, g in zip(by, gradients, strict=True)]
    pairs = []
    for sample, keys, values in zip(samples, by_layer[::2], by_layer[1::2], strict=True):
        counted = ((sample.numbers >= SINKS) & (sample.numbers < prefix)).to(keys.device)
        exact = replace(sample, keys=sample.keys.detach(), values=sample.values.detach(), mask=counted)
        exact = replace(exact, queries=sample.queries.detach(), keys_before_rope=None)
        pairs.append((exact, replace(exact, keys=keys, values=values)))
    return pairs


def drawn(said: Tensor, draw: Callable[[], float]) -> Tensor:
    """Returns a token drawn from each row of log-probabilities `said [positions, vocabulary]`: int64 `[positions, 1]`.

    Uniform numbers come from the host (`draw`), so that every device uses the same ones.
    """
    below = said.double().exp().cumsum(-1)
    uniform = torch.tensor([[draw()] for _ in said], dtype=torch.float64).to(said.device)
    return torch.searchsorted(below, uniform * below[:, -1:], right=True).clamp(max=said.shape[-1] - 1)


def normalised(pairs: list[tuple[LayerSample, LayerSample]]) -> list[LayerSample]:
    """Returns the samples of derivatives (float32), scaled so that every sequence has the same weight.

    Raises NotDifferentiableError if the derivatives are all 0 or not finite.
    """
    weight = 0.0
    for exact, derived in pairs:
        for x, g in ((exact.keys, derived.keys), (exact.values, derived.values)):
            rows, slopes = (part[0, :, exact.mask[0]].double() for part in (x, g))
            slopes, centred = slopes.detach(), rows - rows.mean(1, keepdim=True)
            weight += float((slopes @ centred.mT).square().sum() / centred.shape[1])
    if not math.isfinite(weight) or weight == 0:
        dtype = dtype_name(pairs[0][1].keys.dtype)
        raise NotDifferentiableError(f"derivatives sum to {weight} in {dtype} (try --model.dtype bfloat16 or float32)")
    scale = weight**-0.5
    return [
        replace(one, keys=one.keys.float() * scale, values=one.values.float() * scale, taken_at=exact)
        for exact, one in pairs
    ]
