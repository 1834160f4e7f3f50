"""The codec of stored chunks: `klt` without a cache, its codes as bytes of a size that is known beforehand.

A chunk has a run of tokens as engines hold it: keys after RoPE and values of all layers, `[2, layers, tokens, kv_heads *
head_dim]`. Keys are unrotated by their positions, coded as they were before RoPE, and rotated again when they are decoded.

    bytes           content
    0-127           the header (`header.py`)
    128-            the first n tokens of a text, exact: `[2, layers, n, kv_heads * head_dim]` in the chunk's dtype
    to the end      for each layer, in order: words of keys, sizes of keys, words of values, sizes of values; in the profile
                    "storage" words with the fields of all of these without gaps (`bit_fields.py`), or the output of an entropy
                    coder for them (`entropy.py`), if that is shorter

All numbers are little endian. Tokens at the first `sinks` positions of a text are attention sinks, for which codes of few bits are
too coarse (`docs/serve/storage.md`): they are exact, and n is how many of them the chunk has. With `fixed_size` n is the number for
a chunk at the beginning of a text, and filled with zeros for others. Words and sizes are arrays int16 `[tokens, width]` of all
tokens. Widths may differ from layer to layer and follow from the artifact and the bits; words are laid out as in `kernels/pack`,
sizes with four KV heads in a word. Streams whose heads have no bits take no bytes.

A token's codes are those of `klt`'s cache. (With sizes of one or two KV heads, which take twice the bytes of a cache's, they are
those of a cache with a slightly smaller budget.) Codes, and what is decoded from them, depend on the token and its position alone:
chunks may be cut, joined, and split by KV heads (tensor parallelism) without changing any bit, on one kind of device.
A blob identifies the artifact, but not the text, nor a fine-tuned relative of the model that computed it: the key under which it is
stored must do that.
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
from calib.runtime.storage.profiles import LayerCoders, check_entropy, coders_of, profile_of
from calib.runtime.storage.rope import rotation_of
from calib.runtime.storage.start import StartFinder

SINKS = 4  # the default of `klt`
MOST_SINKS = 2**16 - 1


class Codec:
    """Encodes chunks into bytes and decodes them, for one artifact and one budget. Made with `from_artifact`; threads may share it.

    Attributes:
        layers, kv_heads, head_dim: the model's shape.
        heads: the KV heads of a chunk.
        bits: bits per value of a chunk of all heads, everything that is stored for its coded tokens included.
        sized, predicts, trellis: the forms of its codes, `size`, `predict` and `trellis` of `klt`.
        profile: "heads": each head is coded by itself, as in a cache; or "storage": all heads of a layer are coded together, and
            predicted from the layer before.
        bytes_per_token: bytes of a coded token of a chunk, without the header; with `entropy` the largest number.
        rotation: the model's RoPE.
        identity: a text that identifies the artifact, its model, the options and the allocation of bits, the same for all slices
            of heads. Codecs with equal identity and slice can read each other's blobs.
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
        """Options as checked by `from_artifact`."""
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
        """Returns the codec for the model that the artifact was fitted on.

        Args:
            artifact: an artifact of `calib fit`, or its path.
            bits: the budget in bits per value, keys and values together, as in `klt`.
            size: whether every token has a size (`klt`). None: as `klt` chooses.
            predict: whether values are predicted from keys (`klt`). None: if tokens have sizes and the artifact has the tensors.
            heads: the KV heads of a chunk, without gaps: those of one rank of tensor parallelism. None is all.
            sinks: number of first positions of a text whose tokens are exact, at most 65,535.
            fixed_size: blobs of equally many tokens have equal sizes, for stores that need the size before the position is known:
                all have room for `sinks` exact tokens. Otherwise only chunks that have such tokens have room for them.
            rotation: the model's RoPE; None: that of the configuration in the artifact.
            profile: "storage": all heads of a layer in one basis, and layers predicted from the one before, which takes fewer
                bytes; needs all heads, sizes and predictions, and an artifact of `calib fit --model.storage true`. "heads":
                each head as in a cache. None: "storage" if that is possible.
            entropy: whether codes of the profile "storage" go through an entropy coder: fewer bytes for the same chunk, but their
                number is known only after encoding. Needs the package constriction; not with `fixed_size`.
            trellis: whether levels are trellis-coded (`klt`), in the profile "heads": less error at the same bits, and more time.

        Raises:
            ArtifactError: if the artifact cannot be read, or lacks a tensor.
            ValueError: for an option out of its range, no keys before RoPE in the artifact, or RoPE that cannot be undone.
        """
        artifact = artifact if isinstance(artifact, Artifact) else Artifact.load(artifact)
        chosen = heads_of(heads, artifact.fingerprint["kv_heads"])
        if bits is None:  # `klt` would take its default
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
        if entropy:
            check_entropy(profile, artifact, klt, chosen)
        if entropy and fixed_size:
            raise ValueError(
                "entropy=True with fixed_size=True: entropy-coded blobs differ in size; leave one of them out"
            )
        if coding_of(artifact).rope != "before":
            raise ValueError(
                "the artifact has no statistics of keys before RoPE, which chunks store; fit a model whose RoPE can be undone"
            )
        return cls(
            artifact, klt, chosen, rotation_of(artifact) if rotation is None else rotation, fixed_size, profile, entropy
        )

    def size(self, tokens: int, start: int = 0, dtype: torch.dtype = torch.bfloat16) -> int:
        """Bytes of a blob of `tokens` tokens, at least 1, from position `start` on, in a model of `dtype`. Position 0 has the
        largest size; with `fixed_size` all positions have that size, and with `entropy` it is an upper bound."""
        check_whole("tokens", tokens, 1, "a whole number of tokens, at least 1")
        check_whole("start", start, 0, "a position, a whole number from 0", most=MOST - tokens)
        return HEADER_BYTES + self._payload.most(replace(self._header, tokens=tokens, start=start, dtype=dtype))

    @torch.no_grad()
    def encode(self, chunk: Tensor, start: int) -> Tensor:
        """Encodes a chunk into a blob: uint8 `[size(tokens, start, dtype)]` (with `entropy` at most) in host memory.

        Args:
            chunk: `[2, layers, tokens, kv_heads * head_dim]`, keys after RoPE and values, float32, float16 or bfloat16. It is
                encoded on its own device, and not changed. Its last axis is contiguous.
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
        blocks, total = self._payload.blocks(words, tokens), torch.zeros((), dtype=torch.float32, device=device)
        for part, cos, sin in self._pieces(start, tokens, device):
            told: Tensor | None = None  # what the next layer's prediction needs of a layer
            for layer, coder in enumerate(self._on(device)):
                keys, values = (self._by_head(stream[layer, part]) for stream in chunk)
                total += keys.sum(dtype=torch.float32) + values.sum(dtype=torch.float32)
                found, told = coder.encode(Rotation.rotated(keys.float(), cos, -sin), values, told)
                for name, field in blocks[layer].items():
                    field[part] = found[name]
        # The sum costs little and tells of every NaN and infinity; only finite entries near 1e36 overflow it, too.
        if not math.isfinite(float(total)) and not bool(chunk.isfinite().all()):
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
        """Decodes a blob into its chunk `[2, layers, tokens, kv_heads * head_dim]`, in the dtype of the chunk that was encoded.

        Args:
            blob: bytes, an object with a buffer of bytes, or a uint8 tensor. It need not be trusted.
            out: tensor of that shape and dtype to write to; None makes one.
            device: device of the tensor that is made; None is the CPU.

        Raises:
            BlobError: if the blob is damaged, or not of this codec; then `out` is unchanged.
            ValueError: if `out` has another shape or dtype.
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
        """Estimates the position of a chunk's first token, for engines that do not give it: the one of `candidates` with which keys
        before RoPE are most like those of the calibration (`start.py`). `chunk` is as in `encode`.

        Raises ValueError if no candidate fits, or two fit nearly equally well.
        """
        tokens = self._tokens_of(chunk)
        if not candidates:
            raise ValueError("candidates are empty, expected positions; give those at which a chunk may begin")
        for candidate in candidates:
            check_whole("a candidate", candidate, 0, "a position, a whole number from 0", most=MOST - tokens)
        return self._finder.start_of(chunk[0], sorted({*candidates}))

    @staticmethod
    def _first(header: Header) -> int:
        """Number of exact tokens of the chunk."""
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
        """A view `[kv_heads, tokens, head_dim]` of `rows [tokens, kv_heads * head_dim]`."""
        return rows.unflatten(-1, (len(self.heads), self.head_dim)).transpose(0, 1)

    def _on(self, device: torch.device) -> LayerCoders:
        """The layers' coders with tables on `device`; cached."""
        if device not in self._coders:
            self._coders[device] = [coder.to(device) for coder in self._coders[torch.device("cpu")]]
        return self._coders[device]

    def _pieces(self, start: int, tokens: int, device: torch.device) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Slices of n of a chunk's tokens that are coded together, with cos and sin of their positions, float32 `[n, pairs]`."""
        most = TILE_TOKENS
        if device.type == "cpu":  # float64 temporaries are four times as large, and shall stay in the processor's cache
            most = max(1, min(most, MixedQuant.piece // (len(self.heads) * self.head_dim)))
        for first in range(0, tokens, most):
            part = slice(first, min(first + most, tokens))
            # Tables begin at a multiple of the stride, so that cos and sin of a position have the same bits in every chunk.
            skipped = (start + part.start) % STRIDE
            tables = self.rotation.along(start + part.start - skipped, start + part.stop, device)
            cos, sin = (table[skipped:] for table in tables)
            yield part, cos, sin
