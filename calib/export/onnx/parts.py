"""The parts of a method's plan from which graphs are built: tiers, each with the stages of keys and of values."""

from dataclasses import dataclass, replace
from typing import Any

from calib.export.onnx.basis import Components
from calib.export.onnx.codec import Writer, writer_of
from calib.export.onnx.graph import Graph, Value
from calib.export.onnx.prediction import Predicted
from calib.export.onnx.shape import Fields, Shape
from calib.export.onnx.sized import SizedWords
from calib.export.onnx.transform import ChannelMap, numbers
from calib.runtime.methods import METHODS, packs_of
from calib.runtime.stages.codec import Codec, ScaledChannels
from calib.runtime.stages.codec.corrected import unlisted
from calib.runtime.stages.transform import Basis
from calib.runtime.store import LayerContext, Plan

# Methods with at least one codec that has a writer, and methods that pack tokens but have no such codec.
WITH_GRAPHS = tuple(name for name in METHODS if any(codec.onnx_writer for codec in packs_of(METHODS[name])))
UNWRITTEN = frozenset(name for name in METHODS if packs_of(METHODS[name])) - {*WITH_GRAPHS}


@dataclass(frozen=True)
class Stream:
    """Keys or values of a tier: the runtime's stages, the codec's writer (None: tokens are exact), and their prediction, if any."""

    role: str
    transform: Any
    codec: Codec
    writer: Writer | None
    shape: Shape
    fp32_params: bool
    predicted: Predicted | None = None

    @property
    def measured(self) -> bool:
        """Whether the transform's parameters are measured on a row's first tokens."""
        return self.transform.measured is not None

    def numbers(self) -> Fields:
        """Returns the fields of the transform's measured parameters; none if they are constants of the artifact."""
        return numbers(self.transform, self.shape, self.fp32_params) if self.measured else {}

    def scales(self) -> Fields:
        """Returns the field of channel scales that `encode` takes, because they are measured over other tiers' tokens too.

        One row of scales for each block; empty for other codecs.
        """
        codec = self.codec.uncorrected
        if codec is not self.codec or not isinstance(codec, ScaledChannels) or codec.over != "chunk":
            return {}
        writer = getattr(self.writer, "writer", self.writer)
        tokens = getattr(self.writer, "tokens", None)
        return {"chunk_scales": writer.scales_field._replace(tokens_per_row=tokens)}

    def map(self, graph: Graph, given: dict[str, Value]) -> ChannelMap | Components:
        """Returns the transform in a graph, with constants of the artifact or the measured parameters `given`."""
        if isinstance(self.transform, Basis):
            return Components(graph, self.transform)
        if not self.measured:
            return ChannelMap.constant(graph, self.transform)
        return ChannelMap(**{name: given[name].cast("float32") for name in self.numbers()})


@dataclass(frozen=True)
class Tier:
    """Keys and values of a tier; `name` is empty if there is only one tier, else `tier0.` and so on, the best first."""

    name: str
    keys: Stream
    values: Stream


@dataclass(frozen=True)
class Layer:
    """The tiers of a layer; `before_rope`: keys are encoded before RoPE."""

    tiers: tuple[Tier, ...]
    shape: Shape
    before_rope: bool


def check_written(method: str) -> None:
    """Raises ValueError for a method that packs tokens by codecs without a writer."""
    if method in UNWRITTEN:
        codecs = ", ".join(codec.__name__ for codec in packs_of(METHODS[method]))
        raise ValueError(
            f"method '{method}' packs tokens by {codecs}, which no graph reads yet; those that have one: {', '.join(WITH_GRAPHS)}"
        )


def layer_of(plan: Plan, shape: Shape, fp32_params: bool, context: LayerContext, method: str) -> Layer:
    """Returns the layer of a plan; raises ValueError if the plan quantises nothing, keeps tokens on the host, or has no graph."""
    pairs = plan.pairs(context)
    if plan.on_host or all(codec.exact for codec in plan.codecs()):
        raise ValueError(
            f"method '{method}' as asked keeps tokens exactly, evicts or fetches them, and has no graph; those that have: "
            f"{', '.join(WITH_GRAPHS)}"
        )

    def stream(role: str, pair: Any) -> Stream:
        stages = getattr(pair, role)
        known = stages.transform.measured is not None or isinstance(stages.transform, Basis)
        if not known and stages.transform.prologue() is None:
            raise ValueError(
                f"method '{method}' as asked encodes {role} in the coordinates of a rotation, which has no graph yet; use "
                "basis='none'"
            )
        if stages.transform.measured is None and stages.transform.key_bias is not None:
            raise ValueError(
                f"method '{method}' as asked folds the bias of keys, which has no graph yet; use key_bias='kept'"
            )
        block = pair.page_tokens if getattr(pair, "segments", "none") == "page" else None
        codec = unlisted(stages.codec)
        writer = None if codec.exact else writer_of(codec, shape, fp32_params, block)
        return Stream(role, stages.transform, codec, writer, shape, fp32_params)

    names = [f"tier{number}." for number in range(len(pairs))] if len(pairs) > 1 else [""]

    def tier(name: str, pair: Any) -> Tier:
        keys, values = stream("keys", pair), stream("values", pair)
        if (prediction := getattr(pair, "prediction", None)) is not None:
            assert isinstance(keys.writer, SizedWords)
            values = replace(values, predicted=Predicted(prediction, keys.writer))
        return Tier(name, keys, values)

    return Layer(tuple(map(tier, names, pairs)), shape, plan.before_rope)
