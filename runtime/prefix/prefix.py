"""A cache in a file: a long prompt is compressed once and read back for the same model, method and artifact.

    cache.save("prompt.safetensors", input_ids=inputs["input_ids"])
    cache = compress(model, method="kivi", artifact=artifact, bits=2, prefix="prompt.safetensors")

One safetensors file: the packed pages, windows and parameters as they are in memory, and one line of JSON with method, options and
model, and with lengths and page numbers. Tensors of the artifact are not in it, only their hash: loading needs the same artifact.

    cache.save("prompt.safetensors", storage_bits=1.5)

writes another form: keys and values as codes of `klt`, for any method that can store them without queries (`stored_form.py`).
"""

import os
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import PreTrainedModel

from calib.runtime.artifact.artifact import Artifact
from calib.runtime.artifact.file import digest
from calib.runtime.artifact.fingerprint import FIELDS, ROUNDINGS, fingerprint, first_difference
from calib.runtime.files import canonical_json
from calib.runtime.files.state import State, StateError, check_values, flat, nested, tensor_like
from calib.runtime.messages.dtype_name import dtype_name
from calib.runtime.messages.printable import LENGTH, printable, shortened
from calib.runtime.methods import Geometry, later_options
from calib.runtime.prefix import file as prefix_file
from calib.runtime.prefix import stored_form
from calib.runtime.prefix.file import AGAIN

if TYPE_CHECKING:
    from calib.runtime.cache import CompressedCache

IDS = "input_ids"
STORED = "storage_bits"  # key in "made" of a file of the stored form, which is of no method


class PrefixError(ValueError):
    """A saved cache that cannot be written, read, or used here; the message begins with the path."""


@dataclass(frozen=True)
class Origin:
    """How a cache was made: the method with all its options (plain JSON), the seed, a weak reference to the model, and the artifact
    or None. Copies of a cache share it."""

    method: str
    seed: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)
    model: "weakref.ref[PreTrainedModel] | None" = None
    artifact: Artifact | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "Origin":
        return self


def save(
    cache: "CompressedCache",
    path: str | os.PathLike[str],
    input_ids: Tensor | None = None,
    storage_bits: float | None = None,
) -> None:
    """Writes everything that `cache` holds, or with `storage_bits` its keys and values; arguments as in `CompressedCache.save`.

    Raises PrefixError.
    """
    model = None if cache.origin.model is None else cache.origin.model()
    if model is None:
        raise PrefixError(
            f"{path}: the model of this cache was deleted, and its fingerprint goes into the file; save before"
        )
    cache.sequences.confirm()
    if not any(cache.sequences.lengths):
        raise PrefixError(f"{path}: the cache holds no tokens; run a prompt through the model first")
    try:
        if storage_bits is None:
            state, meaning, made = cache.state(), stages(cache), _made(cache.origin, model)
        else:
            state, meaning = stored_form.save(cache, model, storage_bits)
            made = {STORED: storage_bits, "dtype": dtype_name(model.dtype)}
        if input_ids is not None:
            state[IDS] = _checked_ids(input_ids, len(cache.sequences.lengths), cache.get_seq_length(), path)
        tensors, numbers = flat(state)
        # Copied where needed so that no two tensors share memory: keys and values in host memory are views of one tensor.
        stored = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        for name, tensor in stored.items():
            check_values(name, tensor)  # `load` would refuse these as well
        _check_tokens(state, model)
        document = {"fingerprint": fingerprint(model), "made": made, "stages": meaning, "numbers": numbers}
        prefix_file.write(path, document, stored)
    except PrefixError:
        raise
    except ValueError as error:
        raise PrefixError(f"{path}: cannot be saved: {error}") from error
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise PrefixError(f"{path}: cannot be written ({reason}); choose a folder with room and permission") from error


def load(cache: "CompressedCache", path: str | os.PathLike[str], unseen_weights: bool = False) -> None:
    """Fills `cache`, empty and attached to its model, from a file of `save`; raises PrefixError if the file does not fit it.

    `unseen_weights`: accept weights that cannot be compared, because they could not be read on saving nor now.
    """
    assert cache.origin.model is not None
    model = cache.origin.model()
    assert model is not None
    try:
        document, tensors = prefix_file.read(path)
        _check_model(document["fingerprint"], model, unseen_weights)
        stored = STORED in document["made"]
        _check_made(document["made"], {"dtype": dtype_name(model.dtype)} if stored else _made(cache.origin, model))
        state = nested([*document["numbers"].items(), *tensors.items()])
        _check_tokens(state, model)
        if stored:
            stored_form.fill(cache, model, state, document["stages"], _like(model))
        else:
            cache.restore(state, _like(model))
            if document["stages"] != stages(cache):
                raise StateError(
                    "the numbers that the method takes from its artifact differ; give the artifact that the prefix was made with, "
                    f"or {AGAIN}"
                )
        if IDS in state:
            like = torch.zeros((), dtype=torch.int64, device=model.device)
            cache.input_ids = tensor_like(state, IDS, like.expand(len(cache.sequences.lengths), cache.get_seq_length()))
    except OSError as error:
        raise PrefixError(f"{path}: cannot be read ({error.strerror or error}); name a file of `cache.save`") from error
    except ValueError as error:  # of states, blobs and codecs
        raise PrefixError(f"{path}: {error}") from error


def stages(cache: "CompressedCache") -> str:
    """A hash of all stages of all layers, including tensors and numbers of the artifact."""
    return canonical_json.sha256([_plain(layer.plan) for layer in cache.compressed])


def _plain(part: Any) -> Any:
    if isinstance(part, Tensor):
        return [dtype_name(part.dtype), list(part.shape), digest(part.detach().cpu())]
    if is_dataclass(part) and not isinstance(part, type):
        return {type(part).__name__: {f.name: _plain(getattr(part, f.name)) for f in fields(part)}}
    if isinstance(part, Mapping):
        return {str(name): _plain(value) for name, value in part.items()}
    if isinstance(part, list | tuple):
        return [_plain(value) for value in part]
    return part if part is None or isinstance(part, bool | int | str) else repr(part)


def _made(origin: Origin, model: PreTrainedModel) -> dict[str, Any]:
    return {
        "method": origin.method,
        "options": _plain(origin.options),
        "seed": origin.seed,
        "dtype": dtype_name(model.dtype),
    }


def _check_model(saved: Mapping[str, Any], model: PreTrainedModel, unseen_weights: bool) -> None:
    """Raises StateError unless the model is the saved one; `unseen_weights` accepts weights that could be read neither time."""
    running = fingerprint(model)
    for name in FIELDS[:-1]:
        if saved.get(name) != running[name]:
            told = {"config_hash": "config"}.get(name, name)
            there, here = _difference(saved.get(told), running[told])
            raise StateError(
                f"{told} differs: this model has {here}, the prefix was made with {there}; load the model that made it"
            )
    ours, theirs = running["weights"], saved["weights"]
    if ours == theirs == dict.fromkeys(ROUNDINGS) and not unseen_weights:
        raise StateError(
            "weights cannot be compared (quantised); pass allow_finetuned=True if you know them to be the same"
        )
    if ours != theirs and not any(ours[name] == theirs[name] is not None for name in ROUNDINGS):
        raise StateError("the model's weights are not those that made the prefix; load the model that made it")


def _check_made(said: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Raises StateError unless method, options, seed and dtype are those `wanted` (for the stored form the dtype alone)."""
    for name, asked in wanted.items():
        made = said.get(name)
        if name == "options" and isinstance(made, dict) and said.get("method") == wanted["method"]:
            made = _plain(later_options(wanted["method"], made)) | made
        if made != asked:
            there, here = _difference(made, asked)
            raise StateError(
                f"the prefix was made with {name} {there}, and {here} is asked for; ask for the same, or {AGAIN}"
            )


def _difference(there: Any, here: Any) -> tuple[str, str]:
    """Both values for a message; for two mappings their first entries that differ."""
    if isinstance(there, dict) and isinstance(here, dict):
        there, here = first_difference(there, here)
    there, here = (shortened(side, LENGTH) if isinstance(side, str) else printable(side) for side in (there, here))
    return there, here


def _checked_ids(ids: Tensor, rows: int, columns: int, path: str | os.PathLike[str]) -> Tensor:
    shape = tuple(ids.shape) if isinstance(ids, Tensor) else type(ids).__name__
    if not isinstance(ids, Tensor) or shape != (rows, columns) or ids.is_floating_point():
        raise PrefixError(
            f"{path}: input_ids are {shape}, expected the {rows} x {columns} token ids that the cache has seen"
        )
    return ids.to(torch.int64)


def _check_tokens(state: State, model: PreTrainedModel) -> None:
    """Raises StateError for token ids outside the model's embedding."""
    vocabulary = model.get_input_embeddings().weight.shape[0]
    for name in (IDS, "speculative_tokens"):
        found = state.get(name)
        if isinstance(found, Tensor) and found.numel():
            least, most = (int(end) for end in found.aminmax())
            if least < 0 or most >= vocabulary:
                raise StateError(
                    f"{name!r} are {least} ... {most}, expected token ids of the model, 0 ... {vocabulary - 1}"
                )


def _like(model: PreTrainedModel) -> Callable[[int], tuple[Tensor, Tensor]]:
    """A function that returns empty keys and values of a layer, `[0, kv_heads, 0, head_dim]`, with the model's dtype and on the
    layer's device: a model may be spread over several devices."""
    config = model.config.get_text_config(decoder=True)
    geometry = Geometry.of(config)
    parts: dict[Any, list[Any]] = {}
    for part in model.modules():
        parts.setdefault(getattr(part, "layer_idx", None), []).append(part)

    def like(layer: int) -> tuple[Tensor, Tensor]:
        heads, width, own = geometry.kv_heads, geometry.head_dim, parts.get(layer, [])
        weights = (weight for part in own for weight in part.parameters() if not weight.is_meta)
        device = next((weight.device for weight in weights), model.device)
        for part in own:  # layers may differ, and then each has its own sizes
            said, out = getattr(part, "head_dim", None), getattr(getattr(part, "k_proj", None), "out_features", None)
            width = said if type(said) is int else width
            heads = out // width if type(out) is int else heads
        widths = (width, getattr(config, "v_head_dim", None) or width)
        keys, values = (torch.zeros(0, heads, 0, n, dtype=model.dtype, device=device) for n in widths)
        return keys, values

    return like
