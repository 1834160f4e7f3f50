"""The attention and mask functions that transformers calls by name while a cache of ours is attached to a model.

A mask function of the same name is mandatory: without it transformers passes no mask at all and left-padded rows are
silently wrong. Ours keeps the 2-D padding mask, because a batch x query x key mask at 8 x 32k is 8.6 GB; anything that
is not plain causal or sliding attention is refused. Where the model runs without our cache (or in sliding-window layers
that stay uncompressed), keys and values are tensors and get exact attention here.

torch.compile does not trace either function; the rest of the model is compiled. Pages and lists differ from step to step, and
tracing them again would take minutes.
"""

from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from types import CodeType, FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function

from calib.runtime.layer import CompressedLayer
from calib.runtime.logits import Logits
from calib.runtime.modes import INFERENCE, wants_gradients
from calib.runtime.untraced import untraced

# No "flash", "sdpa" or "/" in the name: transformers reads meaning into them.
NAME = "calib_packed"

# Arguments of some models' attention that are not supported here; ignoring them would give wrong results.
UNKNOWN = {"s_aux": "attention sinks", "position_bias": "a position bias", "indices": "sparse attention"}

# Whether a mask function, identified by its code and closure, is sliding-window attention over that many tokens.
_known: dict[tuple[tuple[Any, ...], int], bool] = {}


@untraced
def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor | CompressedLayer,
    value: Tensor | CompressedLayer,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it: `query [batch, heads, n, D]` -> (output `[batch, n, heads, D]`, None).

    `key` and `value` are tensors `[batch, kv_heads, keys, D]`, or the compressed layer twice. Raises ValueError for dropout,
    attention weights as output, masks that are not 2-D, unknown kinds of attention, and gradients through stored tokens.
    """
    if kwargs.get("output_attentions"):
        raise ValueError(
            "output_attentions=True needs the full attention matrix, which a compressed cache never forms; leave it False"
        )
    if dropout:
        raise ValueError(f"attention dropout {dropout} with a compressed cache: call model.eval() first")
    if attention_mask is not None and attention_mask.ndim != 2:
        raise ValueError(
            f"a custom {attention_mask.ndim}-D attention mask cannot be applied to a compressed cache; pass the 2-D padding mask"
        )
    for argument, what in UNKNOWN.items():
        if kwargs.get(argument) is not None:
            raise ValueError(
                f"{type(module).__name__} uses {what}, which a compressed cache does not support; "
                "run this model with the cache of transformers"
            )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    # Qwen2-MoE passes its window only through the mask.
    window = kwargs.get("sliding_window", getattr(module, "sliding_window", None))
    logits = _logits(scale, softcap, window)
    if isinstance(key, CompressedLayer):
        if key.steps and module.training and wants_gradients(query):
            raise ValueError(INFERENCE)
        output = key.attend(query, attention_mask, logits)
    else:
        assert isinstance(value, Tensor)
        output = exact_attention(query, key, value, attention_mask, logits)
    return output.transpose(1, 2).contiguous(), None


_logits = lru_cache(Logits)  # the same for all layers of most models


def exact_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, logits: Logits) -> Tensor:
    """Exact causal attention on tensors; the last key belongs to the last query. `mask [batch, keys]` is True at real tokens.
    `query [batch, heads, n, D]`, `key` and `value [batch, kv_heads, keys, D]` -> `[batch, heads, n, D]`."""
    length, total, sliding = query.shape[2], key.shape[2], logits.sliding
    sdpa = partial(F.scaled_dot_product_attention, query, key, value, scale=logits.scale, enable_gqa=True)
    if mask is None and logits.softcap is None and (sliding is None or total <= sliding) and length in (1, total):
        return sdpa(is_causal=length > 1)
    positions = torch.arange(total, device=query.device)
    queries = positions[total - length :, None]
    seen = positions <= queries
    if sliding is not None:
        seen = seen & (positions > queries - sliding)
    # Each padded query still sees itself: a row of -inf would give NaN. The output of padded queries is not used.
    seen = seen[None, None] if mask is None else seen[None, None] & mask[:, None, None, :total] | (positions == queries)
    if logits.softcap is None:
        return sdpa(attn_mask=seen)
    groups = query.shape[1] // key.shape[1]
    scores = (query.float() * logits.scale) @ key.float().repeat_interleave(groups, 1).mT
    weights = (torch.tanh(scores / logits.softcap) * logits.softcap).masked_fill(~seen, -torch.inf).softmax(-1)
    return (weights @ value.float().repeat_interleave(groups, 1)).to(query.dtype)


@untraced
def padding_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    config: Any = None,
    **kwargs: Any,
) -> Tensor | None:
    """Returns the 2-D padding mask `[batch, kv_length]` bool of the keys that attention will see, or None without padding.
    Raises ValueError for a mask function that is neither causal nor a sliding window, and for a static cache."""
    held = q_offset + q_length
    if mask_function is not causal_mask_function and not _is_known(
        mask_function, getattr(config, "sliding_window", None), batch_size, held
    ):
        raise ValueError(
            "this model's attention is neither causal nor a sliding window here (tokens of an image or a prefix see later "
            "ones), and a compressed cache supports no other; release it and run this prompt with the cache of transformers"
        )
    if kv_offset + kv_length > held:  # attention assumes that the last key belongs to the last query
        raise ValueError(
            f"a static cache passes {kv_length} keys, of which only {held} are filled, and attention does not support empty ones "
            "while a compressed cache is attached to the model; release that cache first, or use a dynamic one"
        )
    return None if attention_mask is None else attention_mask[:, kv_offset : kv_offset + kv_length]


def _is_known(mask_function: Callable[..., Any], window: int | None, rows: int, held: int) -> bool:
    """Whether the function is causal attention over the last `window` tokens. A function that depends on the text, such as on
    the positions of images, may also be plain causal for this text of `held` tokens."""
    # Every forward makes its function anew. Equal ones are tested once: a recorded step must not wait for the device.
    made = tuple(_parts(mask_function))
    device = next((part.device for part in made if isinstance(part, Tensor)), None)
    if device is not None:
        return any(_shows_the_last(mask_function, last, rows, held, device) for last in {held, window or held})
    if window is None:
        return False
    if not all(isinstance(part, CodeType | int) for part in made):
        return _shows_the_last(mask_function, window, 1, window + 10)
    if (made, window) not in _known:
        _known[made, window] = _shows_the_last(mask_function, window, 1, window + 10)
    return _known[made, window]


def _shows_the_last(
    mask_function: Callable[..., Any], window: int, rows: int, held: int, device: torch.device | None = None
) -> bool:
    """Whether the function equals a causal window of `window` tokens, tested for all of `held` queries at the window's edges."""
    row, query = torch.arange(rows, device=device)[:, None], torch.arange(held, device=device)
    for offset in (-window, 1 - window, 0, 1):
        key = (query + offset).clamp(0, held - 1)
        expected = (key > query - window) & (key <= query)
        if not bool((mask_function(row, torch.zeros_like(row), query, key) == expected).all()):
            return False
    return True


def _parts(part: Any) -> Iterator[Any]:
    """The parts that identify a function: its code, its defaults and what its closure holds, recursively."""
    if isinstance(part, FunctionType):
        yield part.__code__
        part = (part.__defaults__ or (), *(cell.cell_contents for cell in part.__closure__ or ()))
    if isinstance(part, tuple):
        for own in part:
            yield from _parts(own)
    else:
        yield part


def register() -> None:
    """Registers both functions with transformers under NAME; harmless when repeated."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, padding_mask)
