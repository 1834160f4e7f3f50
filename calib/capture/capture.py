"""Runs a model and calls a sink with every attention layer's sample as the forward pass reaches it.

A layer's sample is freed when the sink has returned, so only one layer's sample is in memory beside the model, however
many layers there are. Afterwards the model is restored exactly, also if the sink raises.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from calib.capture.attention import NAME
from calib.capture.device_map import entry_device
from calib.capture.sample import LayerSample, Sink
from calib.errors import RunError
from calib.runtime.unserved_model import why_unserved


def stream(
    model: PreTrainedModel, tokens: Tensor, mask: Tensor, index: Tensor, sink: Sink, begins: Tensor | None = None
) -> None:
    """Runs one forward pass and calls `sink` once for each attention layer, in the model's order.

    The model may be spread over several devices, host memory and disk (`device_map.py`): each sample is on the device
    that computes its layer.

    Args:
        model: a causal language model that uses transformers' AttentionInterface.
        tokens: int64 `[batch, tokens]`; this and the other tensors may be on any device.
        mask: bool `[batch, tokens]`, True for real tokens.
        index: int64 `[batch, tokens]`, the tokens' numbers in the corpus.
        sink: called with each layer's sample; must not keep it.
        begins: int64 `[batch]`, the position of each row's first token; None: 0.

    Raises:
        RunError: NaN or infinite queries, keys or values (names the layer), or a model that cannot be captured.
    """
    device = entry_device(model)
    tokens, mask, index = tokens.to(device), mask.to(device), index.to(device)
    positions = (mask.long().cumsum(-1) - 1).clamp(min=0)
    if begins is not None:
        positions = positions + begins.to(device)[:, None]
    with torch.no_grad(), capturing(model, mask, positions, index, sink):
        # The base model, without the LM head: its logits would be the largest tensor of the pass.
        model.base_model(input_ids=tokens, attention_mask=mask.long(), position_ids=positions, use_cache=False)


class _Batch:
    """The batch in progress: assembles each layer's sample and passes it to the sink."""

    def __init__(self, mask: Tensor, positions: Tensor, index: Tensor, sink: Sink) -> None:
        self.mask, self.positions, self.index, self.sink = mask, positions, index, sink
        self.before_rope: Tensor | None = None

    def project(self, module: nn.Module, _: object, output: Tensor) -> None:
        """Forward hook of a layer's `source_of_keys`: keeps its output, the keys before RoPE."""
        self.before_rope = output

    def receive(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        softcap: float | None,
        window: int | None,
    ) -> None:
        """Checks the tensors, assembles the sample and calls the sink; called by the attention function of layer `module`."""
        layer, before = int(module.layer_idx), self.before_rope
        self.before_rope = None
        device = key.device
        mask = self.mask.to(device)
        for stream_name, x in (("queries", query), ("keys", key), ("values", value)):
            # Padding may hold any value: if the cheap test of all entries fails, only real tokens are tested.
            if not bool(torch.isfinite(x).all()) and not bool(torch.isfinite(x.transpose(1, 2)[mask]).all()):
                raise RunError(
                    f"layer {layer} {stream_name}: NaN or infinite activations; the weights are damaged or "
                    f"{str(x.dtype).removeprefix('torch.')} is too narrow for this model (try --model.dtype float32)"
                )
        self.sink(
            LayerSample(
                layer,
                query,
                key,
                None if before is None else split_heads(before, key),
                value,
                mask,
                self.positions.to(device),
                self.index.to(device),
                scaling,
                softcap,
                window,
            )
        )


def split_heads(projected: Tensor, key: Tensor) -> Tensor:
    """Returns a key projection's (or key norm's) output as `[batch, kv_heads, tokens, head_dim]`, the shape of `key`.

    Its layout depends on where a model norms keys: before splitting heads (OLMo2), before the transposition (Qwen3) or
    after it (Gemma3).

    Raises RunError if the layout is ambiguous, because there are as many tokens as KV heads.
    """
    batch, heads, tokens, width = key.shape
    if projected.dim() == 3:
        return projected.view(batch, tokens, heads, width).transpose(1, 2)
    if heads == tokens:
        raise RunError(
            f"cannot tell heads from tokens in a batch of {tokens} tokens and {heads} KV heads: change data.length"
        )
    return projected if projected.shape == key.shape else projected.transpose(1, 2)


def attention_modules(model: PreTrainedModel) -> Iterator[nn.Module]:
    """Yields the attention modules (those that project keys and have a `layer_idx`), in the model's order."""
    for module in model.base_model.modules():
        fused = any(hasattr(module, name) for name in ("k_proj", "qkv_proj", "query_key_value", "Wqkv"))
        if fused and hasattr(module, "layer_idx"):
            yield module


def source_of_keys(module: nn.Module) -> nn.Module | None:
    """Returns the module whose output becomes the layer's keys by RoPE alone: the key norm, or the key projection.

    None if projections are fused, or keys are normed after RoPE.
    """
    if hasattr(module, "key_layernorm"):  # HunYuan
        return None
    sources = (getattr(module, name, None) for name in ("k_norm", "k_layernorm", "k_proj"))
    return next((source for source in sources if source is not None), None)


@contextmanager
def capturing(model: PreTrainedModel, mask: Tensor, positions: Tensor, index: Tensor, sink: Sink) -> Iterator[None]:
    """Context that routes the model's attention through the capture, for one forward pass over these tokens.

    Arguments as in `stream`, with `positions` int64 `[batch, tokens]`. Restores the model on exit. Raises RunError for a
    model that cannot be captured.
    """
    batch = _Batch(mask, positions, index, sink)
    if not model._can_set_attn_implementation():
        raise RunError(
            f"{type(model).__name__} does not use transformers' AttentionInterface, so its keys cannot be captured; "
            "use a version of the model that is part of transformers"
        )
    if reason := why_unserved(model):
        raise RunError(reason)
    modules = list(attention_modules(model))
    if not modules:
        raise RunError(f"{type(model).__name__} has no attention layer with a key projection")
    configs = {id(owner.config): owner.config for owner in (model.base_model, *modules)}.values()
    before = [config._attn_implementation for config in configs]
    training = [(module, module.training) for module in model.modules()]
    handles = []
    try:
        for module in modules:
            module._calib_receive = partial(batch.receive, module)
            if (source := source_of_keys(module)) is not None:
                handles.append(source.register_forward_hook(batch.project))
        for config in configs:
            config._attn_implementation_internal = NAME
        model.eval()
        yield
    finally:
        for config, implementation in zip(configs, before, strict=True):
            config._attn_implementation_internal = implementation
        for module, was_training in training:
            module.training = was_training
        for handle in handles:
            handle.remove()
        for module in modules:
            module.__dict__.pop("_calib_receive", None)
