"""Chunks of keys and values, and the decoding of stored ones in float64, from the formulas and the documented layout alone."""

import math
import struct

import numpy as np
import torch
from oracle import rotated
from torch import Tensor
from trellis_paths import trellis_components

from calib.runtime import Artifact
from calib.runtime.artifact.component_bits import Allocation
from calib.runtime.artifact.components import Coding
from calib.runtime.methods.klt import Klt

HEADER = 128  # bytes


def chunk_of(model, tokens: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """A random chunk `[2, layers, tokens, kv_heads * head_dim]` of about unit variance; every 17th token is 4 times as long."""
    config, draw = model.config, torch.Generator().manual_seed(seed)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = heads * (getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    chunk = torch.randn(2, config.num_hidden_layers, tokens, width, generator=draw)
    chunk[:, :, ::17] *= 4
    return chunk.to(dtype)


def fields_of(blob: bytes, artifact: Artifact, klt: Klt) -> list[dict[str, np.ndarray]]:
    """Each layer's words, uint16 `[tokens, W]`, read in the documented order: keys, their sizes, values, their sizes."""
    (tokens,) = struct.unpack_from("<I", blob, 36)
    allocation, at, found = allocation_of(artifact, klt), HEADER + exact_bytes(blob), []
    for layer in range(artifact.fingerprint["layers"]):
        own = {}
        for role in ("keys", "values"):
            counts = allocation.streams[role][layer].counts
            for name, width in (("words", sum(counts)), ("sizes", math.ceil(len(counts) / 4) if klt.size else 0)):
                data = np.frombuffer(blob, "<u2", tokens * width, at)
                own[f"{role}.{name}"], at = data.reshape(tokens, width), at + 2 * tokens * width
        found.append(own)
    assert at == len(blob)
    return found


def allocation_of(artifact: Artifact, klt: Klt) -> Allocation:
    """The bit allocation of a chunk, whose token sizes are stored in whole 16-bit words."""
    (found,) = klt.allocations(artifact, klt.coding(artifact, whole_words=True))
    return found


def exact_bytes(blob: bytes) -> int:
    """Bytes of a text's first tokens (sinks), which are stored exactly between the header and the codes; with the form bit 4, which
    fixes a chunk's size, there is room for as many in every chunk."""
    (sinks,), (tokens, start) = struct.unpack_from("<H", blob, 14), struct.unpack_from("<IQ", blob, 36)
    layers, _, _, heads, channels = struct.unpack_from("<5I", blob, 16)
    count = min(sinks, tokens) if blob[13] & 4 else max(0, min(sinks - start, tokens))
    return count * 2 * layers * heads * channels * {1: 4, 2: 2, 3: 2}[blob[12]]


def codes_of(words: np.ndarray, widths: tuple[int, ...]) -> np.ndarray:
    """Unpack words `[tokens, W]`: field p of word w is component p W + w, fields from the lowest bits on."""
    first = np.cumsum([0, *widths[:-1]])
    planes = [(words >> bit) & ((1 << width) - 1) for bit, width in zip(first, widths, strict=True)]
    return np.concatenate(planes, 1)


def sizes_of(words: np.ndarray, heads: int) -> np.ndarray:
    """Sizes s = 2^((i - 5) / 2), float64 `[tokens, kv_heads]`, i of 4 bits: field p of word w is head p W + w."""
    numbers = codes_of(words, (4, 4, 4, 4))[:, :heads].astype(np.float64)
    return 2.0 ** ((numbers - 5) / 2)


def decoded(
    blob: bytes, artifact: Artifact, klt: Klt, frequencies: Tensor, start: int, chunk: Tensor
) -> tuple[Tensor, float]:
    """Decode a blob: the chunk in float64 `[2, layers, tokens, kv_heads, D]`, keys rotated to their positions from `start` on,

        x^ = mean + s sum_j (c_j - (2^b_j - 1) / 2) step_j T^-1_j        with predictions, values also have + M (k^ - mean_k)

    and the largest error of a code: |y_j - y^_j| in half steps s step_j / 2, over all components y_j of `chunk`, which was encoded,
    between the first level and the last. With a trellis c_j - (2^b_j - 1) / 2 is 9/16 2^b_j times the level in [-1, 1].
    """
    coding, off = Coding("before", klt.size, klt.predict), [0.0]
    allocation, layers = allocation_of(artifact, klt), []
    for layer, fields in enumerate(fields_of(blob, artifact, klt)):
        moved, means = {}, {}
        for role, given in zip(("keys", "values"), chunk[:, layer].double(), strict=True):
            mean, rows, steps = (
                artifact.tensor(coding.name(role, kind))[layer].double().numpy() for kind in ("mean", "basis", "steps")
            )
            words, at, heads = allocation.streams[role][layer], 0, []
            positions = torch.arange(start, start + len(given), dtype=torch.float64)[:, None]
            x = given.unflatten(-1, (len(mean), -1)).transpose(0, 1)
            if role == "keys":
                x = rotated(x, frequencies, -positions)
            elif klt.predict:
                matrix = artifact.tensor("values.klt.predicted.matrix")[layer].double()
                known = moved["keys"] @ matrix.mT
                x = x - known
            for head, count in enumerate(words.counts):
                codes = codes_of(fields[f"{role}.words"][:, at : at + count], words.widths)[:, : mean.shape[1]]
                at += count
                bits = np.array(words.bits_of(head)[: codes.shape[1]], dtype=int)
                number, last = np.arange(len(bits)), 2.0**bits - 1
                step = steps[head, number, bits - 1] * np.ones((len(codes), 1))
                if klt.size:
                    step = step * sizes_of(fields[f"{role}.sizes"], len(words.counts))[:, head, None]
                if klt.trellis:
                    of_head = fields[f"{role}.words"][None, :, at - count : at].view(np.int16)
                    levels = trellis_components(of_head, words.widths, (count,))[0][:, : mean.shape[1]]
                    y = levels * 9 / 16 * 2.0**bits * step
                else:
                    y = (codes - last / 2) * step
                wanted = (x[head].numpy() - mean[head]) @ rows[head][: len(bits)].T
                inner = np.abs(wanted) < last / 2 * step * (9 / 8 if klt.trellis else 1)
                off.append(float((np.abs(wanted - y) / (step / 2))[inner].max(initial=0)))
                heads.append(y @ np.linalg.inv(rows[head])[:, : len(bits)].T)
            moved[role], means[role] = torch.tensor(np.stack(heads)), torch.tensor(mean)[:, None]
        keys, values = moved["keys"] + means["keys"], moved["values"] + means["values"]
        if klt.predict:
            values = values + known
        layers.append(torch.stack([rotated(keys, frequencies, positions), values]))
    return torch.stack(layers, 1).transpose(2, 3), max(off)
