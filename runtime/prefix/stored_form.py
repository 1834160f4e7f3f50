"""A prefix as keys and values: a stored chunk for each row (`storage/codec.py`), instead of the cache's own pages.

The file is smaller, and of no method: the cache that is filled from it stores the tokens by its own method, as a prefill would.
So it can be loaded only by methods that need no queries to store tokens, and saved only from caches that have dropped none.

    rows/lengths    tokens of each row
    seen            columns that the cache has seen, padding included
    chunks/0 ...    uint8: the blob of each row, with all layers, from position 0 on
"""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import PreTrainedModel

from calib.runtime.files import canonical_json
from calib.runtime.files.state import State, StateError, branch, check_values, fitting, whole, wholes
from calib.runtime.layer import CompressedLayer
from calib.runtime.messages.dtype_name import dtype_name
from calib.runtime.messages.printable import printable
from calib.runtime.prefix.file import AGAIN
from calib.runtime.rotation import Rotation
from calib.runtime.storage import Codec, Header
from calib.runtime.store import Store

if TYPE_CHECKING:
    from calib.runtime.cache import CompressedCache

CHUNKS = "chunks"
WITHOUT = "leave storage_bits out"
OTHER = "load it by another method, such as 'kivi'"
ARTIFACT = "pass artifact=Artifact.load(...) from `calib fit` to compress"


def save(cache: "CompressedCache", model: PreTrainedModel, bits: float) -> tuple[State, str]:
    """Returns the tree for the file, and a hash of the codec's identity. Raises ValueError if this cache cannot be saved so."""
    _check_takes(cache, (layer.store for layer in cache.compressed if layer.store is not None), WITHOUT)
    lengths, sliding = cache.sequences.lengths, cache.sequences.sliding
    if any(layer.plan.evicts for layer in cache.compressed):
        raise StateError(
            f"{cache.method} drops tokens, and storage_bits stores all; save the cache of another, such as 'full'"
        )
    if sliding is not None and max(lengths) >= sliding:
        raise StateError(
            f"a row has {max(lengths)} tokens, and those before the sliding window of {sliding} are not kept; {WITHOUT}"
        )
    if not all(lengths):
        raise StateError(
            f"rows have {printable(lengths)} tokens, and storage_bits needs at least one in each; {WITHOUT}"
        )
    codec = _codec(cache, model, bits)
    chunks: State = {str(row): codec.encode(_chunk(cache, codec, row), 0) for row in range(len(lengths))}
    return {"rows": {"lengths": lengths}, "seen": cache.get_seq_length(), CHUNKS: chunks}, _meaning(codec)


def fill(
    cache: "CompressedCache",
    model: PreTrainedModel,
    state: State,
    meaning: str,
    like: Callable[[int], tuple[Tensor, Tensor]],
) -> None:
    """Fills an empty cache from the tree and hash of `save`; `like` returns empty keys and values of a layer, on its device. Raises
    ValueError, and then the cache stays empty."""
    lengths, seen = wholes(branch(state, "rows"), "lengths", least=1), whole(state, "seen")
    _check_takes(cache, (_opened(layer, like(number)) for number, layer in enumerate(cache.compressed)), OTHER)
    rows = _chunks(cache, model, branch(state, CHUNKS), meaning, lengths)
    longest = max(lengths)
    if seen < longest:
        raise StateError(f"'seen' is {seen}, expected at least each row's {printable(lengths)} tokens; {AGAIN}")
    real = torch.arange(longest) >= longest - torch.tensor(lengths)[:, None]
    for number, layer in enumerate(cache.compressed):
        keys, values = (part.new_zeros(len(rows), part.shape[1], longest, part.shape[3]) for part in like(number))
        for row, chunk in enumerate(rows):
            for stream, own in enumerate((keys, values)):
                own[row, :, longest - lengths[row] :] = chunk[stream, number].transpose(0, 1)
        layer.fill(keys, values, None if bool(real.all()) else real, seen)


def _check_takes(cache: "CompressedCache", stores: Iterable[Store], remedy: str) -> None:
    """Raises StateError if a store needs queries to store tokens."""
    if any(store.observes for store in stores):
        raise StateError(
            f"{cache.method} chooses by queries what it stores, and a file of storage_bits has no queries; {remedy}"
        )


def _opened(layer: CompressedLayer, like: tuple[Tensor, Tensor]) -> Store:
    """An empty store on the meta device, for properties that the plan alone does not have."""
    keys, values = (part.to("meta") for part in like)
    return layer.plan.open(keys, values, layer.sequences, layer.context)


def _codec(cache: "CompressedCache", model: PreTrainedModel, bits: float, blob: Header | None = None) -> Codec:
    """The codec of all layers; with the forms in the header of a `blob`, else with the default ones for the artifact."""
    artifact = cache.origin.artifact
    if artifact is None:
        raise StateError(f"storage_bits stores codes of klt, which need an artifact; {ARTIFACT}")
    layers = artifact.fingerprint["layers"]
    if not len(cache.compressed) == len(cache.layers) == layers:
        raise StateError(
            f"{len(cache.compressed)} of {layers} layers are compressed, and storage_bits needs a model in which all are (no "
            f"sliding or recurrent layers beside others); {WITHOUT}"
        )
    rotation = Rotation.of(model, WITHOUT)
    if blob is None:
        return Codec.from_artifact(artifact, bits, rotation=rotation)
    profile = "storage" if blob.joint else "heads"
    return Codec.from_artifact(
        artifact, bits, blob.size, blob.predict, sinks=blob.sinks, rotation=rotation, profile=profile
    )


def _meaning(codec: Codec) -> str:
    return canonical_json.sha256(codec.identity)


def _chunk(cache: "CompressedCache", codec: Codec, row: int) -> Tensor:
    """Keys and values of a row, `[2, layers, tokens, kv_heads * head_dim]` in host memory and the model's dtype."""
    tokens, dtype = cache.sequences.lengths[row], cache.compressed[0].dtype
    chunk = torch.empty(2, codec.layers, tokens, codec.kv_heads, codec.head_dim, dtype=dtype)
    for number, layer in enumerate(cache.compressed):
        assert layer.store is not None
        for stream, held in zip(chunk, layer.store.read_back(row), strict=True):
            if held.shape != (codec.kv_heads, tokens, codec.head_dim):
                own, wanted = (
                    f"{heads} KV heads of {n}" for heads, _, n in (held.shape, (codec.kv_heads, 0, codec.head_dim))
                )
                raise StateError(f"layer {number} has {own} channels, expected {wanted} as in the artifact; {WITHOUT}")
            stream[number] = held.transpose(0, 1)
    check_values(f"{CHUNKS}/{row}", chunk)  # `fill` would refuse these as well
    return chunk.flatten(3)


def _chunks(
    cache: "CompressedCache", model: PreTrainedModel, blobs: State, meaning: str, lengths: list[int]
) -> list[Tensor]:
    """The decoded chunk of each row, `[2, layers, tokens, kv_heads, head_dim]` in host memory. Raises ValueError."""
    if not lengths or len(blobs) != len(lengths):
        raise StateError(
            f"{len(blobs)} chunks for rows of {printable(lengths)} tokens, expected one chunk a row; {AGAIN}"
        )
    chunks = [fitting(blobs, str(row), torch.uint8, [None]) for row in range(len(lengths))]
    first = Header.read(chunks[0])
    codec = _codec(cache, model, first.bits, first)
    if _meaning(codec) != meaning:
        raise StateError(
            "the numbers that klt takes from the artifact differ; give the artifact that the prefix was saved with"
        )
    for row, chunk in enumerate(chunks):
        told = Header.read(chunk)
        found, expected = (told.tokens, told.start, told.dtype), (lengths[row], 0, model.dtype)
        if found != expected:
            there, here = (
                f"{count} {dtype_name(dtype)} tokens from {start}" for count, start, dtype in (found, expected)
            )
            raise StateError(f"the chunk of row {row} has {there}, expected {here}; {AGAIN}")
    decoded = [codec.decode(chunk).unflatten(-1, (codec.kv_heads, codec.head_dim)) for chunk in chunks]
    for row, tokens in enumerate(decoded):
        check_values(f"{CHUNKS}/{row}", tokens)  # exact tokens in a forged file may be too large for attention
    return decoded
