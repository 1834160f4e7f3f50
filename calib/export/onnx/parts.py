"""What of a method's plan is written as graphs: tiers, each with the stages of keys and of values."""

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

# Methods some of whose codecs have a writer, and those that pack tokens by codecs of which none has.
WITH_GRAPHS = tuple(name for name in METHODS if any(codec.onnx_writer for codec in packs_of(METHODS[name])))
UNWRITTEN = frozenset(name for name in METHODS if packs_of(METHODS[name])) - {*WITH_GRAPHS}


@dataclass(frozen=True)
class Stream:
    """Keys or values of a tier: the runtime's stages, what writes its codec (None: tokens are exact), and what predicts them."""

    role: str
    transform: Any
    codec: Codec
    writer: Writer | None
    shape: Shape
    fp32_params: bool
    predicted: Predicted | None = None

    @property
    def measured(self) -> bool:
        """Whether the transform's numbers come from a row's first tokens."""
        return self.transform.measured is not None

    def numbers(self) -> Fields:
        """What was measured, if anything is."""
        return numbers(self.transform, self.shape, self.fp32_params) if self.measured else {}

    def scales(self) -> Fields:
        """Channel scales that `encode` is given, because they were measured over tokens of other tiers, too: a row a block."""
        codec = self.codec.uncorrected
        if codec is not self.codec or not isinstance(codec, ScaledChannels) or codec.over != "chunk":
            return {}
        writer = getattr(self.writer, "writer", self.writer)
        tokens = getattr(self.writer, "tokens", None)
        return {"chunk_scales": writer.scales_field._replace(tokens_per_row=tokens)}

    def map(self, graph: Graph, given: dict[str, Value]) -> ChannelMap | Components:
        """The transform in a graph, from the artifact's numbers or from those `given`."""
        if isinstance(self.transform, Basis):
            return Components(graph, self.transform)
        if not self.measured:
            return ChannelMap.constant(graph, self.transform)
        return ChannelMap(**{name: given[name].cast("float32") for name in self.numbers()})


@dataclass(frozen=True)
class Tier:
    """Both streams; `name` is empty where there is one tier, else `tier0.`, best first."""

    name: str
    keys: Stream
    values: Stream


@dataclass(frozen=True)
class Layer:
    """Tiers of a layer; `before_rope`: keys are encoded as they were before RoPE."""

    tiers: tuple[Tier, ...]
    shape: Shape
    before_rope: bool


def check_written(method: str) -> None:
    """Raises ValueError for a method whose codes have no graph."""
    if method in UNWRITTEN:
        codecs = ", ".join(codec.__name__ for codec in packs_of(METHODS[method]))
        raise ValueError(
            f"method '{method}' packs tokens by {codecs}, which no graph reads yet; those that have one: {', '.join(WITH_GRAPHS)}"
        )


def layer_of(plan: Plan, shape: Shape, fp32_params: bool, context: LayerContext, method: str) -> Layer:
    """Raises ValueError for a plan that quantises nothing, or whose tokens lie on the host."""
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
