"""A cache in a file: a long prompt is compressed once and read back for the same model, method and artifact.

    cache.save("prompt.safetensors", input_ids=inputs["input_ids"])
    cache = compress(model, method="kivi", artifact=artifact, bits=2, prefix="prompt.safetensors")

One safetensors file: the packed pages, windows and parameters as they lie in memory, and one line of JSON with what made them
and with lengths and page numbers. What the artifact gave is not in it but as a hash: it must be given again, the same.
"""

import os
import weakref
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import TYPE_CHECKING, Any

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedModel

from calib.runtime import canonical_json
from calib.runtime.artifact_file import digest
from calib.runtime.atomic_file import atomically
from calib.runtime.fingerprint import FIELDS, ROUNDINGS, fingerprint, first_difference
from calib.runtime.state import StateError, flat, named, nested, tensor_like

if TYPE_CHECKING:
    from calib.runtime.cache import CompressedCache

FORMAT = "1"
KEY = "calib_prefix"  # the only entry of the file's metadata
PARTS = ("crc32", "fingerprint", "format", "made", "numbers", "sha256", "stages")
IDS = "input_ids"
AGAIN = "run the prompt again and save its cache anew"


class PrefixError(ValueError):
    """A saved cache that cannot be written, read, or used here; the message begins with the path."""


@dataclass(frozen=True)
class Origin:
    """What made a cache: the method with all its options (plain JSON), the seed, and the model, which it does not keep alive."""

    method: str
    seed: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)
    model: "weakref.ref[PreTrainedModel] | None" = None


def save(cache: "CompressedCache", path: str | os.PathLike[str], input_ids: Tensor | None = None) -> None:
    """Writes everything that `cache` holds; see `CompressedCache.save`."""
    model = None if cache.origin.model is None else cache.origin.model()
    if model is None:
        raise PrefixError(f"{path}: the model of this cache is gone, and a prefix says whose it is; save it before")
    cache.rows.confirm()
    if not any(cache.rows.lengths):
        raise PrefixError(f"{path}: the cache holds no tokens; run a prompt through the model first")
    state = cache.state()
    if input_ids is not None:
        state[IDS] = _checked_ids(input_ids, len(cache.rows.lengths), cache.get_seq_length(), path)
    tensors, numbers = flat(state)
    # No two share memory then: the streams of host memory are views of one tensor, a token's key beside its value.
    stored = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    document = {
        "format": FORMAT,
        "fingerprint": fingerprint(model),
        "made": _made(cache.origin, model),
        "stages": stages(cache),
        "numbers": numbers,
        "crc32": _crc32(stored),
    }
    document["sha256"] = canonical_json.sha256(document)
    try:
        with atomically(path) as temporary:
            safetensors.torch.save_file(stored, temporary, {KEY: canonical_json.dumps(document)})
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise PrefixError(f"{path}: cannot be written ({reason}); choose a folder with room and permission") from error


def load(cache: "CompressedCache", path: str | os.PathLike[str], unseen_weights: bool = False) -> None:
    """Fills `cache`, empty and attached, with what `save` wrote; raises PrefixError where it is not this cache's.

    `unseen_weights`: also where the weights cannot be compared, because they could not be read either time.
    """
    assert cache.origin.model is not None
    model = cache.origin.model()
    assert model is not None
    try:
        document, tensors = _read(path)
        _check_origin(document, cache.origin, model, unseen_weights)
        state = nested({**document["numbers"], **tensors})
        cache.restore(state, lambda layer: _device_of(model, layer))
        if document["stages"] != stages(cache):
            raise StateError(
                "the numbers that the method takes from its artifact differ; give the artifact that the prefix was made with, or "
                f"{AGAIN}"
            )
        if IDS in state:
            like = torch.zeros(len(cache.rows.lengths), cache.get_seq_length(), dtype=torch.int64, device=model.device)
            cache.input_ids = tensor_like(state, IDS, like)
    except OSError as error:
        raise PrefixError(f"{path}: cannot be read ({error.strerror or error}); name a file of `cache.save`") from error
    except (StateError, SafetensorError) as error:
        raise PrefixError(f"{path}: {error}") from error


def stages(cache: "CompressedCache") -> str:
    """A hash of every stage of every layer, the tensors and numbers of an artifact included."""
    return canonical_json.sha256([_plain(layer.plan) for layer in cache.compressed])


def _plain(part: Any) -> Any:
    if isinstance(part, Tensor):
        return [named(part.dtype), list(part.shape), digest(part.detach().cpu())]
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
        "dtype": named(model.dtype),
    }


def _check_origin(
    document: Mapping[str, Any], origin: Origin, model: PreTrainedModel, unseen_weights: bool = False
) -> None:
    """The same model, method, options, seed and dtype; `unseen_weights` accepts such as neither time could be read."""
    running, saved = fingerprint(model), document["fingerprint"]
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
    for name, asked in _made(origin, model).items():
        made = document["made"].get(name)
        if made != asked:
            there, here = _difference(made, asked)
            raise StateError(
                f"the prefix was made with {name} {there}, and {here} is asked for; ask for the same, or {AGAIN}"
            )


def _difference(there: Any, here: Any) -> tuple[Any, Any]:
    """What differs: of two mappings the first entry."""
    return first_difference(there, here) if isinstance(there, dict) and isinstance(here, dict) else (there, here)


def _read(path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The checked document and every tensor, still in the file."""
    if os.path.isdir(path):
        raise StateError("is a folder; name a file of `cache.save`")
    with open(path, "rb"):  # a plain OSError where there is none
        pass
    with safe_open(os.fspath(path), "pt") as file:
        text = (file.metadata() or {}).get(KEY)
        if text is None:
            raise StateError("is no saved cache; name a file of `cache.save`")
        try:
            document = canonical_json.loads(text)
        except ValueError as error:
            raise StateError(f"its metadata is not JSON ({error}); {AGAIN}") from error
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            found = document.get("format") if isinstance(document, dict) else None
            raise StateError(f"has format {found!r}, expected {FORMAT!r}; read it with the version that wrote it")
        rest = {name: part for name, part in document.items() if name != "sha256"}
        if tuple(sorted(document)) != PARTS or canonical_json.sha256(rest) != document["sha256"]:
            raise StateError(f"its metadata was changed after it was written; {AGAIN}")
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (no mapping)
    if _crc32(tensors) != document["crc32"]:
        raise StateError(f"its tensors were changed after they were written; {AGAIN}")
    return document, tensors


def _crc32(tensors: Mapping[str, Tensor]) -> int:
    """Of names and bytes in the names' order: against accidents, and several times as fast as a hash."""
    found = 0
    for name in sorted(tensors):
        found = zlib.crc32(name.encode(), found)
        found = zlib.crc32(tensors[name].reshape(-1).view(torch.uint8).numpy().data, found)
    return found


def _checked_ids(ids: Tensor, rows: int, columns: int, path: str | os.PathLike[str]) -> Tensor:
    shape = tuple(ids.shape) if isinstance(ids, Tensor) else type(ids).__name__
    if not isinstance(ids, Tensor) or shape != (rows, columns) or ids.is_floating_point():
        raise PrefixError(
            f"{path}: input_ids are {shape}, expected the {rows} x {columns} token ids that the cache has seen"
        )
    return ids.to(torch.int64)


def _device_of(model: PreTrainedModel, layer: int) -> torch.device:
    """Where a model that is spread over several devices computes the attention of a layer."""
    for module in model.modules():
        if getattr(module, "layer_idx", None) == layer:
            for weight in module.parameters():
                if not weight.is_meta:
                    return weight.device
    return model.device
