"""Calibrated bases of quantisation residuals, for GEAR's low-rank part (arXiv:2403.05527, eq. 6) without power iteration.

Tensors: `{stream}.residual.FORM.BITS`, float32 `[layers, kv_heads, r, head_dim]`, for each form of quantiser and bit
width: orthonormal rows, the leading eigenvectors of the second moment E[R^T R] of the residual R = x - x^, largest
eigenvalue first. FORM is the quantiser's group, tokens x channels, `*` for the whole axis: `*x1` is a channel over all
tokens of a sequence. A group of all the head's channels is always written `*`: with 64 channels `1x64` is `1x*`.

Each bit width has its own bases, because most bases do not suit another width. If each key channel has its own group (`*x1`,
`64x1`), the residual is largest in the channels with the widest range at any width. If several channels share a group, they
share a step, and the residual's directions depend on the width.
"""

import re
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from calib.capture.sample import LayerSample
from calib.capture.shape import Shape
from calib.errors import UsageError
from calib.kernels.outliers.reference import extremes
from calib.runtime.artifact.tensor_registry import STREAMS
from calib.runtime.messages.printable import printable
from calib.statistics.contract import Statistic
from calib.statistics.forms import Form

RANK = 8
BITS = (2, 4)
SHARE = 0.02  # share of outliers removed before quantising, both ends together: GEAR's default
HALF = "half"  # 1x(head_dim / 2)
# The groups of GEAR's backbones (64: of its kivi backbone) and of MiKV (half a head).
FORMS: Mapping[str, Sequence[str]] = {"keys": ("*x1", "64x1", "*x*", HALF), "values": ("1x*", "1x64", "*x*", HALF)}
GROUP = re.compile(r"(\*|[1-9][0-9]*)x(\*|[1-9][0-9]*)")


class ResidualBasis(Statistic):
    """For every form, bit width, layer and KV head, the second moment of the residual; its eigenvectors are the bases.

    Outliers, which GEAR keeps exact, are removed first from each row of entries (keys: a channel over the sequence's tokens;
    values: a token over its head's channels): they are replaced by the mean of the rest, and R is 0 there.

    The moments are float64 `[layers, kv_heads, head_dim, head_dim]` for each form and width, on the device of the fit and
    in each of its checkpoints. Llama 2 7B (32 layers, 32 KV heads, 128 channels): 134 MB each, 1.9 GB for the 7 forms and
    2 widths that it has by default. Without forms nothing is held or computed.

    Args:
        shape: the model's sizes.
        bits: bit widths of the residuals, increasing, 1 to 8.
        rank: vectors of a basis, at least 1; `head_dim` where that is less.
        forms: lists of form names by stream, as `residual_forms` takes them.
    """

    def __init__(
        self,
        shape: Shape,
        bits: Sequence[int] = BITS,
        rank: int = RANK,
        forms: Mapping[str, Sequence[str]] = FORMS,
    ) -> None:
        super().__init__()
        if not bits or list(bits) != sorted(set(bits)) or not all(1 <= width <= 8 for width in bits):
            raise UsageError(
                f"model.residual_bits={list(bits)}: increasing bit widths from 1 to 8, such as {list(BITS)}"
            )
        if rank < 1:
            raise UsageError(f"model.residual_rank={rank}: must be at least 1")
        self.bits, self.rank = tuple(bits), min(rank, shape.head_dim)
        self.forms = residual_forms(shape.head_dim, forms)
        sizes = (len(self.bits), shape.layers, shape.kv_heads, shape.head_dim, shape.head_dim)
        for number, _ in enumerate(self.forms):
            self.register_buffer(f"moment_{number}", torch.zeros(sizes, dtype=torch.float64))
            self.register_buffer(f"tokens_{number}", torch.zeros((), dtype=torch.int64))
        self.reductions = {name: "sum" for name, _ in self.named_buffers()}

    def observe(self, sample: LayerSample) -> None:
        """Adds the layer's residuals; tokens beyond the last whole group of a form are left out."""
        if not self.forms:
            return
        for part in sample.without_padding():
            filled: dict[tuple[str, int], tuple[Tensor, Tensor]] = {}
            for number, form in enumerate(self.forms):
                x = getattr(part, form.stream)
                whole = whole_groups(x.shape[2], form)
                if not whole:
                    continue
                if (form.stream, whole) not in filled:
                    filled[form.stream, whole] = without_outliers(x[:, :, :whole].float(), form.stream)
                rest, outlier = filled[form.stream, whole]
                for moment, bits in zip(getattr(self, f"moment_{number}"), self.bits, strict=True):
                    residual = (rest - form.approximate(rest, bits, 1.0, {}, sample.layer)).masked_fill(outlier, 0)
                    rows = residual.transpose(0, 1).flatten(1, 2).double()  # [kv_heads, batch * tokens, head_dim]
                    moment[sample.layer] += (rows.mT @ rows).to(moment.device)
                getattr(self, f"tokens_{number}").add_(x.shape[0] * whole)

    def tensors(self) -> dict[str, Tensor]:
        """Returns the bases; unit vectors of the first channels for layers without samples or without any residual.

        A form whose groups have more tokens than every sequence is left out.
        """
        return {
            f"{form.stream}.residual.{form.name}.{bits}": leading(moment.cpu(), self.rank)
            for number, form in enumerate(self.forms)
            if getattr(self, f"tokens_{number}")
            for moment, bits in zip(getattr(self, f"moment_{number}"), self.bits, strict=True)
        }


def residual_forms(head_dim: int, wanted: Mapping[str, Sequence[str]] = FORMS) -> tuple[Form, ...]:
    """Returns the forms that are measured, each once and under its name in the artifact.

    Args:
        head_dim: channels of a head.
        wanted: names of forms for `keys` and `values`: TOKENSxCHANNELS, or `half` for `1x(head_dim / 2)`. A stream that
            is not named has no forms. More channels than head_dim mean the whole head, as in the methods; a form whose
            channels do not divide head_dim is left out, since no method can quantise that way.

    Raises:
        UsageError: an unknown stream, or a name that is no form.
    """
    found: dict[tuple[str, str], Form] = {}
    for stream, names in wanted.items():
        if stream not in STREAMS:
            raise UsageError(f"model.residual_forms: {printable(stream)} is no stream; expected keys or values")
        for name in names:
            if group := group_of(stream, name, head_dim):
                written = "x".join("*" if size is None else str(size) for size in group)
                found[stream, written] = Form(stream, written, group)
    return tuple(found.values())


def group_of(stream: str, name: str, head_dim: int) -> tuple[int | None, int | None] | None:
    """Returns tokens and channels of the form `name` (None: the whole axis); None if the channels do not divide `head_dim`."""
    if name == HALF:
        return (1, head_dim // 2) if head_dim % 2 == 0 else None
    parts = GROUP.fullmatch(name)
    if parts is None:
        raise UsageError(
            f"model.residual_forms.{stream}: {printable(name)} is no form; expected tokens x channels such as '*x1' or 1x64, "
            f"* for all of them, or {HALF} for 1x(head_dim / 2)"
        )
    tokens, channels = (None if size == "*" else int(size) for size in parts.groups())
    if channels is None or channels >= head_dim:
        return tokens, None
    return (tokens, channels) if head_dim % channels == 0 else None


def whole_groups(tokens: int, form: Form) -> int:
    """Returns `tokens` rounded down to a multiple of the form's tokens per group."""
    step = (form.group[0] if form.group else None) or 1
    return tokens // step * step


def without_outliers(x: Tensor, stream: str) -> tuple[Tensor, Tensor]:
    """Returns `x [batch, kv_heads, tokens, head_dim]` with outliers replaced, and a bool mask of the outliers.

    The outliers of a row of N entries are the k largest and k smallest, k = max(1, floor(SHARE / 2 * N)), at most N / 2.
    They are replaced by the mean of the rest (0 if nothing is left).
    """
    rows = x.mT if stream == "keys" else x
    entries = rows.shape[-1]
    count = min(max(1, int(SHARE / 2 * entries)), entries // 2)
    outlier = torch.zeros_like(rows, dtype=torch.bool).scatter_(-1, extremes(rows, count), True)
    mean = rows.masked_fill(outlier, 0).sum(-1, keepdim=True) / max(1, entries - 2 * count)
    filled = torch.where(outlier, mean, rows)
    return (filled.mT.contiguous(), outlier.mT) if stream == "keys" else (filled, outlier)


def leading(moment: Tensor, rank: int) -> Tensor:
    """Returns the `rank` leading eigenvectors of `moment [..., D, D]`, float64 symmetric: float32 rows `[..., rank, D]`.

    An eigenvector's sign is arbitrary: its entry of largest magnitude is made positive, so that the same moments give the
    same bytes. For a moment with trace 0 the result is the first unit vectors.
    """
    basis = torch.linalg.eigh(moment).eigenvectors.mT.flip(-2)[..., :rank, :]
    basis = basis * basis.gather(-1, basis.abs().argmax(-1, keepdim=True)).sign()
    nothing = moment.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None] == 0
    return torch.where(nothing, torch.eye(moment.shape[-1], dtype=moment.dtype)[:rank], basis).float()
