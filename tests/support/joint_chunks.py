"""Decodes a chunk of the profile "storage" in float64, from the formulas and the documented layout alone."""

import struct
from dataclasses import replace

import numpy as np
import torch
from oracle import rotated
from stored_chunks import HEADER, exact_bytes
from torch import Tensor
from toy_artifact import toy_storage

from calib.runtime import Artifact, Codec
from calib.runtime.artifact.component_widths import widths_at
from calib.runtime.storage import Header
from calib.runtime.storage.codec import MOST_SINKS

ROLES = ("keys", "values")


def with_storage(artifact: Artifact) -> Artifact:
    """The same artifact with the tensors of `toy_storage` added."""
    sizes = (artifact.fingerprint[name] for name in ("layers", "kv_heads", "head_dim"))
    tensors = {**artifact.tensors, **toy_storage(tuple(sizes), torch.Generator().manual_seed(5))}
    return Artifact(tensors, artifact.fingerprint, artifact.provenance, artifact.clip_bits)


def usual(codec: Codec, tokens: int, seed: int = 0) -> Tensor:
    """A chunk for which a codec's entropy coder is made: codes are drawn from the coder's own tables and decoded."""
    draw, coder, width = torch.Generator().manual_seed(seed), codec._payload.entropy, codec.kv_heads * codec.head_dim
    fields = [torch.multinomial(table.counts(), tokens, True, generator=draw) for table in coder.tables]
    parts = torch.stack(fields, -1).split([len(own.widths) for own in coder.fields], -1)
    words = torch.cat([own.packed(part).flatten() for own, part in zip(coder.fields, parts, strict=True)])
    payload = words.numpy().astype("<u2").tobytes()
    blank = Header.read(codec.encode(torch.zeros(2, codec.layers, tokens, width), 9 + MOST_SINKS))
    return codec.decode(replace(blank, payload_bytes=len(payload)).packed(memoryview(payload)) + payload)


def fields_of(words: np.ndarray, widths: list[int]) -> np.ndarray:
    """Fields, float64 `[tokens, fields]`, of words uint16 `[tokens, W]`: a token's words are one number, fields from its lowest
    bits on; the remaining bits must be 0."""
    rows = []
    for token in words.astype("<u2"):
        number, own = int.from_bytes(token.tobytes(), "little"), []
        for width in widths:
            own.append(number & ((1 << width) - 1))
            number >>= width
        assert number == 0
        rows.append(own)
    return np.array(rows, dtype=np.float64)


def decoded(
    blob: bytes, artifact: Artifact, bits: float, frequencies: Tensor, start: int, chunk: Tensor
) -> tuple[Tensor, float]:
    """Decode a blob: the chunk in float64 `[2, layers, tokens, W]`, keys rotated to their positions from `start` on,

        x^ = mean + M f + s sum_j (c_j - (2^b_j - 1) / 2) step_j T^-1_j        f: what was decoded before, less its mean

    and the largest error of a code: the distance of the component of `chunk`, which was encoded, from its level, in half steps
    s step_j / 2, over all codes but the first and the last level.
    """
    allocation = widths_at({role: artifact.tensor(f"{role}.storage.errors") for role in ROLES}, bits)
    (tokens,), at, off, layers = struct.unpack_from("<I", blob, 36), HEADER + exact_bytes(blob), [0.0], []
    _, heads, count, told = *artifact.tensor("keys.klt.mean").shape[:2], artifact.fingerprint["layers"], None
    turns = torch.arange(start, start + tokens, dtype=torch.float64)[:, None]
    for layer in range(count):
        widths = [list(allocation.streams[role][layer].widths) for role in ROLES]
        every = [*widths[0], 4, *widths[1], 4]
        length = -(-sum(every) // 16)
        words, at = np.frombuffer(blob, "<u2", tokens * length, at).reshape(tokens, length), at + 2 * tokens * length
        numbers, known, found = fields_of(words, every), told, []
        for role, own, given in zip(ROLES, widths, chunk[:, layer].double(), strict=True):
            mean, rows, steps, matrix = (
                artifact.tensor(f"{role}.storage.{kind}")[layer].double().numpy()
                for kind in ("mean", "basis", "steps", "matrix")
            )
            mean, rows, steps = mean[0], rows[0], steps[0]
            codes, number, numbers = numbers[:, : len(own)], numbers[:, len(own)], numbers[:, len(own) + 1 :]
            known = np.zeros((tokens, 2 * len(mean))) if known is None else known
            width, last = np.array(own), 2.0 ** np.array(own) - 1
            step = steps[np.arange(len(own)), width - 1] * 2.0 ** ((number[:, None] - 5) / 2)
            y = (codes - last / 2) * step
            x = given.unflatten(-1, (heads, -1)).transpose(0, 1)
            x = (rotated(x, frequencies, -turns) if role == "keys" else x).transpose(0, 1).flatten(1).numpy()
            wanted = (x - mean - known @ matrix) @ rows[: len(own)].T
            inner = (codes > 0) & (codes < last)
            off.append(float((np.abs(wanted - y) / (step / 2))[inner].max(initial=0)))
            f = known @ matrix + y @ np.linalg.inv(rows)[:, : len(own)].T
            known = np.concatenate([known, f], 1)
            back = torch.tensor(f + mean).unflatten(-1, (heads, -1)).transpose(0, 1)
            back = rotated(back, frequencies, turns) if role == "keys" else back
            found.append(back.transpose(0, 1).flatten(1))
        told = known[:, -2 * len(mean) :]
        layers.append(torch.stack(found))
    assert at == len(blob)
    return torch.stack(layers, 1), max(off)
