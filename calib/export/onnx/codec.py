"""Chooses the writer, a class that builds ONNX nodes, for a codec of the runtime."""

from typing import Any

from calib.export.onnx.corrected import Repaired
from calib.export.onnx.low_rank import Factors
from calib.export.onnx.outliers import ExactEntries
from calib.export.onnx.scaled_channels import Scaled
from calib.export.onnx.segments import Blocks
from calib.export.onnx.shape import Shape
from calib.export.onnx.sized import SizedWords
from calib.export.onnx.sparse import Pairs
from calib.export.onnx.trellis import TrellisWords
from calib.export.onnx.uniform import Uniform
from calib.export.onnx.words import WordCodesWriter, Words
from calib.runtime.stages.codec import Codec

Alone = Uniform | Pairs | Scaled | WordCodesWriter | SizedWords
Writer = Alone | Repaired | Blocks

# Writers by the name in `Codec.onnx_writer`.
WRITERS: dict[str, type[Any]] = {
    "uniform": Uniform,
    "pairs": Pairs,
    "scaled channels": Scaled,
    "words": Words,
    "trellis": TrellisWords,
    "sized words": SizedWords,
}


def writer_of(codec: Codec, shape: Shape, fp32_params: bool, block: int | None) -> Writer:
    """Returns the writer of `codec`.

    Args:
        codec: bound to a layer.
        shape: KV heads and channels.
        fp32_params: store parameters (scales, zero points and the like) in float32 instead of float16.
        block: tokens of a block, if blocks are segments with their own parameters; None: one segment per row.

    Raises ValueError for a codec without a writer, and for atoms sampled from each row's prompt.
    """
    writer: Alone | Repaired = _alone(codec.uncorrected, shape, fp32_params)
    if (own := codec.corrections) is not None:
        outliers = None if own.outliers is None else ExactEntries(own.outliers, shape, fp32_params)
        low_rank = None if own.low_rank is None else Factors(own.low_rank, shape, fp32_params, block)
        residual = None if own.residual is None else Uniform(own.residual, shape, fp32_params)
        writer = Repaired(writer, outliers, low_rank, residual)
    return writer if block is None else Blocks(writer, block)


def _alone(codec: Codec, shape: Shape, fp32_params: bool) -> Alone:
    if codec.onnx_writer is None:
        raise ValueError(f"{type(codec).__name__} has no graph yet; the codecs that have one: {', '.join(WRITERS)}")
    if codec.sampling is not None:
        raise ValueError(
            f"online={codec.sampling.columns} atoms are sampled from each row's prompt and have no graph; use online=0 with an "
            "artifact"
        )
    writer: Alone = WRITERS[codec.onnx_writer](codec, shape, fp32_params)
    return writer
