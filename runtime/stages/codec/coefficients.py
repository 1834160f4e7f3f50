"""Storage formats for the coefficients of a sparse representation: half precision as in CSR's paper, or fewer bits."""

from dataclasses import dataclass

import torch
from torch import Tensor

from calib.kernels.pack.reference import bytes_per_token, pack_bytes, unpack_bytes
from calib.kernels.to_half import stored
from calib.runtime.messages.printable import printable
from calib.runtime.paging.field import Block, Field
from calib.runtime.paging.stored_values import Float8

FLOAT8_MAX = torch.finfo(torch.float8_e4m3fn).max


@dataclass(frozen=True)
class Coefficients:
    """A format: "fp16"; "fp8" (e4m3, saturating at 448); or a whole number of bits, 2 ... 8, signed, with a scale a token."""

    form: str | int = "fp16"

    def __post_init__(self) -> None:
        if self.form not in ("fp16", "fp8") and not (type(self.form) is int and 2 <= self.form <= 8):
            raise ValueError(
                f"coefficients must be 'fp16', 'fp8' or a whole number of bits 2 ... 8, got {printable(self.form)}"
            )

    def fields(self, count: int, fp32_params: bool) -> dict[str, Field]:
        """Storage of a token's `count` coefficients; with `fp32_params` float16 numbers are stored in float32."""
        half = torch.float32 if fp32_params else torch.float16
        if isinstance(self.form, int):
            width = bytes_per_token(count, self.form)
            return {
                "coefficients": Field(1, width, torch.uint8, "codes"),
                "scale": Field(1, 1, half, "parameters"),
            }
        # float8 is stored as bytes, because few indexing operations of torch support it.
        if self.form == "fp16":
            return {"coefficients": Field(1, count, half, "codes")}
        return {"coefficients": Field(1, count, torch.uint8, "codes", values=Float8())}

    def encode(self, coefficients: Tensor, fp32_params: bool) -> Block:
        """`coefficients [..., n]` float32 -> fields."""
        if self.form == "fp16":
            return {"coefficients": stored(coefficients, fp32_params)}
        if self.form == "fp8":
            clamped = coefficients.clamp(-FLOAT8_MAX, FLOAT8_MAX)
            return {"coefficients": clamped.to(torch.float8_e4m3fn).view(torch.uint8)}
        assert isinstance(self.form, int)
        most = 2 ** (self.form - 1) - 1
        scale = stored(coefficients.abs().amax(-1, keepdim=True) / most, fp32_params)
        step = scale.float()
        codes = torch.where(step > 0, coefficients / step, 0).round().clamp(-most, most) + most
        return {"coefficients": pack_bytes(codes.to(torch.int32), self.form), "scale": scale}

    def decode(self, block: Block, count: int) -> Tensor:
        """Fields `[..., width]` -> float32 `[..., n]`."""
        kept = block["coefficients"]
        if self.form == "fp16":
            return kept.float()
        if self.form == "fp8":
            return kept.view(torch.float8_e4m3fn).float()
        assert isinstance(self.form, int)
        most = 2 ** (self.form - 1) - 1
        return (unpack_bytes(kept, self.form, count) - most).float() * block["scale"].float()
