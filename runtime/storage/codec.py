"""The codec of stored chunks: `klt` without a cache, its codes as bytes of a size that is known beforehand.

A chunk is what engines hold of a run of tokens: keys behind RoPE and values of all layers, `[2, layers, tokens, kv_heads *
head_dim]`. Keys are unrotated by their positions, coded as they were before RoPE, and rotated again when they are decoded.

    bytes           what
    0-127           the header (`header.py`)
    128-            the first tokens of a text as they are: `[2, layers, n, kv_heads * head_dim]` in the chunk's dtype
    to the end      for each layer, in order: words of keys, sizes of keys, words of values, sizes of values; in the profile
                    "storage" words that hold all of these, field behind field (`bit_fields.py`), or what an entropy coder makes
                    of them (`entropy.py`), where that is shorter

All is little endian. Tokens at the first `sinks` positions of a text are attention sinks, which no code of few bits holds
(`docs/serve/storage.md`): they are exact, and n is how many of them the chunk has. With `fixed_size` n is as if the chunk began a
text, zeros where it does not. Words and sizes are arrays int16 `[tokens, width]`, of all tokens. Widths differ from layer to layer
and follow from the artifact and the bits; words are laid out as `kernels/pack` says, sizes four KV heads to a word. Streams whose
heads got no bits take no bytes.

A token's codes are those of `klt`'s cache; of one or two KV heads with sizes, of a cache of a few more bits, whose sizes take half
as much. They depend on the token and its position alone, and so does what they decode to: a chunk may be cut, joined, and split
by KV heads (tensor parallelism) without a change of any bit, on one kind of device.
A blob says whose artifact made it, not which text it is of, nor that a fine-tuned relative of the model computed it: the key under
which it is stored must.
"""

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from calib.kernels.attend.operation import STRIDE
from calib.runtime.artifact.artifact import Artifact
from calib.runtime.artifact.components import coding_of
from calib.runtime.messages.printable import printable
from calib.runtime.messages.whole_numbers import MOST, check_whole
from calib.runtime.methods.contract import check_flag
from calib.runtime.methods.klt import BITS, Klt
from calib.runtime.paging.pages import TILE_TOKENS
from calib.runtime.rotation import Rotation
from calib.runtime.stages.codec import MixedQuant
from calib.runtime.storage.entropy import EntropyCoder
from calib.runtime.storage.hashes import artifact_hash, layout_hash
from calib.runtime.storage.header import (
    AGAIN,
    DTYPES,
    HEADER_BYTES,
    BlobError,
    Bytes,
    Header,
    checked,
    exact_tokens,
    view_of,
)
from calib.runtime.storage.heads import heads_of
from calib.runtime.storage.payload import Payload
from calib.runtime.storage.profiles import LayerCoders, coders_of, profile_of
from calib.runtime.storage.rope import rotation_of
from calib.runtime.storage.start import StartFinder

SINKS = 4  # as `klt` has by default
MOST_SINKS = 2**16 - 1


class Codec:
    """Chunks to bytes and back, for one artifact and one budget. Make it with `from_artifact`; threads may share it.

    Attributes:
        layers, kv_heads, head_dim: of the model.
        heads: the KV heads of a chunk.
        bits: per value of a chunk of all heads, all that is stored of its tokens counted.
        sized, predicts, trellis: the forms of its codes, `size`, `predict` and `trellis` of `klt`.
        profile: "heads", each coded by itself as in a cache, or "storage", where heads and layers help each other.
        bytes_per_token: of a chunk, the header apart; with `entropy` at most.
        rotation: the model's RoPE.
        identity: a line for the artifact, its model, the options and how bits were shared out, the same for all slices of heads.
            Codecs of one identity and one slice read each other's blobs.
    """

    def __init__(
        self,
        artifact: Artifact,
        klt: Klt,
        heads: range,
        rotation: Rotation,
        fixed_size: bool,
        profile: str,
        entropy: bool,
    ) -> None:
        """From options that `from_artifact` has checked."""
        found = artifact.fingerprint
        self.layers, self.kv_heads, self.head_dim = found["layers"], found["kv_heads"], found["head_dim"]
        assert klt.bits is not None
        coding, allocation, coders = coders_of(profile, artifact, klt, heads)
        self.heads, self.rotation, self.profile = heads, rotation, profile
        self.sized, self.predicts, self.trellis = coding.size, coding.predict, coding.trellis
        coder = EntropyCoder.of(artifact, allocation, coders) if entropy else None
        values = 2 * self.layers * len(heads) * self.head_dim
        self._payload = Payload(values, [layer.widths() for layer in coders], coder)
        self.bits, self.bytes_per_token = allocation.bits, self._payload.bytes_per_token
        self._coders: dict[torch.device, LayerCoders] = {torch.device("cpu"): coders}
        self._finder = StartFinder.of(artifact, heads, rotation)
        self._header = Header(
            dtype=torch.float32,
            size=coding.size,
            predict=coding.predict,
            sinks=klt.sinks,
            fixed_size=fixed_size,
            layers=self.layers,
            kv_heads=self.kv_heads,
            heads=heads,
            head_dim=self.head_dim,
            tokens=0,
            start=0,
            bits=float(klt.bits),
            payload_bytes=0,
            artifact=artifact_hash(artifact, coding),
            layout=layout_hash(allocation, None if coder is None else coder.identity()),
            joint=profile == "storage",
            entropy=entropy,
            trellis=coding.trellis,
        )
        header = self._header
        self.identity = f"{header.artifact.hex()} {header.layout.hex()} {header.bits!r} {header.sinks} {fixed_size}"

    @classmethod
    def from_artifact(
        cls,
        artifact: Artifact | str | os.PathLike[str],
        bits: float = BITS,
        size: bool | None = None,
        predict: bool | None = None,
        heads: range | slice | None = None,
        sinks: int = SINKS,
        fixed_size: bool = False,
        rotation: Rotation | None = None,
        profile: str | None = None,
        entropy: bool = False,
        trellis: bool = False,
    ) -> "Codec":
        """For the model that the artifact was fitted on.

        Args:
            artifact: of `calib fit`, or its path.
            bits: the budget in bits per value, keys and values together, as `klt` takes it.
            size: whether every token has a size (`klt`). None: as `klt` has it.
            predict: whether values are predicted from keys (`klt`). None: where tokens have sizes, and the artifact has the rest.
            heads: the KV heads of a chunk, without gaps: those of one rank of tensor parallelism. None is all.
            sinks: first positions of a text, whose tokens are exact, to 65,535.
            fixed_size: every blob of so many tokens has one size, for stores that want to know it before the position: with room
                for `sinks` exact tokens. Without it only chunks that have such tokens have the room.
            rotation: the model's RoPE; None: that of the configuration in the artifact.
            profile: "storage": all heads of a layer in one basis, and layers predicted from the one before, which takes fewer
                bytes; of all heads, with sizes and predictions, and of an artifact of `calib fit --model.storage true`. "heads":
                each head as in a cache. None: "storage" where it can be had.
            entropy: codes of the profile "storage" go through an entropy coder: the same chunk of fewer bytes, whose number is
                known when they are made. Needs the package constriction, and goes with no `fixed_size`.
            trellis: whether levels are trellis-coded (`klt`), in the profile "heads": less error at the same bits, and more time.

        Raises:
            ArtifactError: the artifact cannot be read, or lacks a tensor.
            ValueError: an option out of its range, no keys before RoPE in the artifact, or RoPE that cannot be undone.
        """
        artifact = artifact if isinstance(artifact, Artifact) else Artifact.load(artifact)
        chosen = heads_of(heads, artifact.fingerprint["kv_heads"])
        if bits is None:  # of `klt` the default
            raise ValueError("bits must be a number above 0, got None")
        if not isinstance(rotation, Rotation | None):
            raise ValueError(
                f"rotation must be a Rotation, got {printable(rotation)}; `Rotation.of(model, '')` gives one"
            )
        klt = Klt(bits=bits, size=size, predict=predict, trellis=trellis, sinks=sinks)
        profile = profile_of(profile, artifact, klt, chosen)
        check_whole("sinks", sinks, 0, "a whole number from 0", most=MOST_SINKS)
        check_flag("fixed_size", fixed_size)
        check_flag("entropy", entropy)
        if entropy and profile != "storage":
            raise ValueError(
                f"entropy=True with profile={profile!r}: it codes that of 'storage', of all heads and of an artifact of "
                "`calib fit --model.storage true`; leave it out"
            )
        if entropy and fixed_size:
            raise ValueError(
                "entropy=True with fixed_size=True: its blobs have sizes of their own; leave one of them out"
            )
        if coding_of(artifact).rope != "before":
            raise ValueError(
                "the artifact has no keys before RoPE, which stored chunks are made of; fit a model whose RoPE can be unrotated"
            )
        return cls(
            artifact, klt, chosen, rotation_of(artifact) if rotation is None else rotation, fixed_size, profile, entropy
        )

    def size(self, tokens: int, start: int = 0, dtype: torch.dtype = torch.bfloat16) -> int:
        """Bytes of a blob of so many tokens, at least 1, from position `start` on, in a model of `dtype`. At position 0 they are
        the most; with `fixed_size` every start has as many, and with `entropy` blobs have at most these."""
        check_whole("tokens", tokens, 1, "a whole number of tokens, at least 1")
        check_whole("start", start, 0, "a position, a whole number from 0", most=MOST - tokens)
        return HEADER_BYTES + self._payload.most(replace(self._header, tokens=tokens, start=start, dtype=dtype))

    @torch.no_grad()
    def encode(self, chunk: Tensor, start: int) -> Tensor:
        """The blob of a chunk: uint8 `[size(tokens, start, dtype)]` in host memory, where its checksum is computed and whence it is
        stored.

        Args:
            chunk: `[2, layers, tokens, kv_heads * head_dim]`, keys behind RoPE and values, float32, float16 or bfloat16, on any
                device, where it is coded. Rows of `kv_heads * head_dim` without gaps; left as it is.
            start: the position of its first token.

        Raises ValueError for a chunk of another shape or dtype, with NaN or infinities, or beyond the last position.
        """
        tokens, device = self._tokens_of(chunk), chunk.device
        check_whole("start", start, 0, "a position, a whole number from 0", most=MOST - tokens)
        header = replace(self._header, dtype=chunk.dtype, tokens=tokens, start=start)
        blob = torch.empty(HEADER_BYTES + self._payload.most(header), dtype=torch.uint8)
        data = blob[HEADER_BYTES:]
        payload = self._payload.words(data, header)
        words = payload if device.type == "cpu" else torch.empty_like(payload, device=device)
        blocks, total = self._payload.blocks(words, tokens), torch.zeros((), device=device)
        for part, cos, sin in self._pieces(start, tokens, device):
            told: Tensor | None = None  # by a layer to the next
            for layer, coder in enumerate(self._on(device)):
                keys, values = (self._by_head(stream[layer, part]) for stream in chunk)
                total += keys.sum(dtype=torch.float32) + values.sum(dtype=torch.float32)
                found, told = coder.encode(Rotation.rotated(keys.float(), cos, -sin), values, told)
                for name, field in blocks[layer].items():
                    field[part] = found[name]
        if not math.isfinite(float(total)):
            raise ValueError("the chunk has NaN or infinite entries, expected none; store what the model computed")
        if words is not payload:
            payload.copy_(words)
        exact, count = self._payload.exact(data, header), self._first(header)
        exact[:, :, :count] = chunk[:, :, :count]
        exact[:, :, count:] = 0
        coded = self._payload.shortened(data, header)
        if coded is not data:
            blob = torch.cat([blob[:HEADER_BYTES], coded])
        header = replace(header, payload_bytes=len(coded))
        bytes_of = view_of(blob)
        bytes_of[:HEADER_BYTES] = header.packed(bytes_of[HEADER_BYTES:])
        return blob

    @torch.no_grad()
    def decode(
        self, blob: Bytes | Tensor, out: Tensor | None = None, device: torch.device | str | None = None
    ) -> Tensor:
        """The chunk `[2, layers, tokens, kv_heads * head_dim]` of a blob, in the dtype of the one that was encoded.

        Args:
            blob: bytes, anything with a buffer of bytes, or a uint8 tensor. Untrusted.
            out: where to write it, of that shape and dtype; None makes a tensor.
            device: of a tensor that is made; None is the CPU.

        Raises:
            BlobError: the blob is damaged, or none of this codec's; nothing has been written then.
            ValueError: `out` has another shape or dtype.
        """
        header, data = checked(blob, self._header, self._payload.sizes)
        tokens, shape = header.tokens, (2, self.layers, header.tokens, len(self.heads) * self.head_dim)
        exact, count = self._payload.exact(data, header), self._first(header)
        if not bool(exact.isfinite().all()):
            raise BlobError(f"the blob has exact tokens with NaN or infinite entries, expected none; {AGAIN}")
        if out is None:
            out = torch.empty(shape, dtype=header.dtype, device=device)
        elif out.shape != shape or out.dtype != header.dtype:
            raise ValueError(
                f"out is {tuple(out.shape)} {out.dtype}, expected {shape} {header.dtype}; `Header.read(blob)` tells what it holds"
            )
        blocks = self._payload.blocks(self._payload.words(data, header).to(out.device), tokens)
        for part, cos, sin in self._pieces(header.start, tokens, out.device):
            told: Tensor | None = None
            for layer, coder in enumerate(self._on(out.device)):
                own = {name: field[part] for name, field in blocks[layer].items()}
                keys, values, told = coder.decode(own, part.stop - part.start, told)
                self._by_head(out[0, layer, part]).copy_(Rotation.rotated(keys, cos, sin))
                self._by_head(out[1, layer, part]).copy_(values)
        out[:, :, :count] = exact[:, :, :count].to(out.device)
        return out

    @torch.no_grad()
    def start_of(self, chunk: Tensor, candidates: Sequence[int]) -> int:
        """The position of a chunk's first token, where an engine does not tell it: of `candidates` the one that leaves keys as
        small as calibration found them (`start.py`). `chunk` is as in `encode`.

        Raises ValueError where no candidate fits, or two fit nearly alike.
        """
        tokens = self._tokens_of(chunk)
        if not candidates:
            raise ValueError("candidates are empty, expected positions; give those at which a chunk may begin")
        for candidate in candidates:
            check_whole("a candidate", candidate, 0, "a position, a whole number from 0", most=MOST - tokens)
        return self._finder.start_of(chunk[0], sorted({*candidates}))

    @staticmethod
    def _first(header: Header) -> int:
        """How many tokens of the chunk are exact."""
        return exact_tokens(header.tokens, header.start, header.sinks, False)

    def _tokens_of(self, chunk: Tensor) -> int:
        if not isinstance(chunk, Tensor):
            raise ValueError(f"the chunk is a {type(chunk).__name__}, expected a tensor; convert it")
        width = len(self.heads) * self.head_dim
        shape = tuple(chunk.shape)
        if len(shape) != 4 or shape[:2] != (2, self.layers) or shape[3] != width or not 1 <= shape[2] <= MOST:
            raise ValueError(
                f"the chunk has shape {shape}, expected [2, {self.layers}, tokens, {width}]: keys and values, layers, at least one "
                f"token, {len(self.heads)} KV heads of {self.head_dim} channels"
            )
        if chunk.dtype not in DTYPES.values():
            raise ValueError(f"the chunk is {chunk.dtype}, expected float32, float16 or bfloat16; convert it")
        return shape[2]

    def _by_head(self, rows: Tensor) -> Tensor:
        """`[tokens, kv_heads * head_dim]` as `[kv_heads, tokens, head_dim]`, the same memory."""
        return rows.unflatten(-1, (len(self.heads), self.head_dim)).transpose(0, 1)

    def _on(self, device: torch.device) -> LayerCoders:
        """The layers' stages there."""
        if device not in self._coders:
            self._coders[device] = [coder.to(device) for coder in self._coders[torch.device("cpu")]]
        return self._coders[device]

    def _pieces(self, start: int, tokens: int, device: torch.device) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Runs of n of a chunk's tokens that are coded together, with cos and sin of their positions, float32 `[n, pairs]`."""
        most = TILE_TOKENS
        if device.type == "cpu":  # in float64 they are four times as large, and stay in the processor's own cache
            most = max(1, min(most, MixedQuant.piece // (len(self.heads) * self.head_dim)))
        for first in range(0, tokens, most):
            part = slice(first, min(first + most, tokens))
            # From a multiple of the stride on: cos and sin of a position are the same bits then, whatever the chunk.
            skipped = (start + part.start) % STRIDE
            tables = self.rotation.along(start + part.start - skipped, start + part.stop, device)
            cos, sin = (table[skipped:] for table in tables)
            yield part, cos, sin
