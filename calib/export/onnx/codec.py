"""Which twin writes a codec of the runtime."""

from calib.export.onnx.corrected import Repaired
from calib.export.onnx.low_rank import Factors
from calib.export.onnx.outliers import ExactEntries
from calib.export.onnx.segments import Blocks
from calib.export.onnx.shape import Shape
from calib.export.onnx.sparse import Pairs
from calib.export.onnx.uniform import Uniform
from calib.runtime.stages.codec import Codec, Corrected, Sparse, UniformQuant

Writer = Uniform | Pairs | Repaired | Blocks


def writer_of(codec: Codec, shape: Shape, wide: bool, block: int | None = None) -> Writer:
    """The writer of `codec`, for each `block` of tokens apart where these are segments.

    `wide`: numbers that share a group are float32. Raises ValueError for atoms sampled from each row's prompt.
    """
    if not isinstance(codec, Corrected):
        writer: Uniform | Pairs | Repaired = _alone(codec, shape, wide)
    else:
        outliers = None if codec.outliers is None else ExactEntries(codec.outliers, shape, wide)
        low_rank = None if codec.low_rank is None else Factors(codec.low_rank, shape, wide, block)
        residual = None if codec.residual is None else Uniform(codec.residual, shape, wide)
        writer = Repaired(_alone(codec.codec, shape, wide), outliers, low_rank, residual)
    return writer if block is None else Blocks(writer, block)


def _alone(codec: Codec, shape: Shape, wide: bool) -> Uniform | Pairs:
    if isinstance(codec, UniformQuant):
        return Uniform(codec, shape, wide)
    assert isinstance(codec, Sparse)
    if codec.columns:
        raise ValueError(
            f"online={codec.columns} atoms are sampled from each row's prompt and have no graph; use online=0 with an artifact"
        )
    return Pairs(codec, shape, wide)
