"""What of a method's plan is written as graphs: tiers, each with the stages of keys and of values."""

from dataclasses import dataclass
from typing import Any

from calib.export.onnx.codec import Writer, writer_of
from calib.export.onnx.graph import Graph, Value
from calib.export.onnx.shape import Fields, Shape
from calib.export.onnx.transform import MEASURED, ChannelMap, numbers
from calib.runtime.methods import METHODS
from calib.runtime.ordered.store import LayerPlan
from calib.runtime.stages.codec import Codec, Exact
from calib.runtime.store import Place, Plan
from calib.runtime.tiered.plan import TieredPlan

EXACT_ALONE = frozenset({"full", "h2o", "infllm", "offload", "oracle", "specache", "streaming_llm"})
UNWRITTEN = frozenset({"klt"})  # packed, but nothing writes words whose fields differ in width
WITH_GRAPHS = tuple(sorted(set(METHODS) - EXACT_ALONE - UNWRITTEN))


@dataclass(frozen=True)
class Stream:
    """Keys or values of a tier: the runtime's stages, and what writes its codec (None: tokens are exact)."""

    role: str
    transform: Any
    codec: Codec
    writer: Writer | None
    shape: Shape
    wide: bool

    @property
    def measured(self) -> bool:
        """Whether the transform's numbers come from a row's first tokens."""
        return type(self.transform) in MEASURED

    def numbers(self) -> Fields:
        """What was measured, if anything is."""
        return numbers(self.transform, self.shape, self.wide) if self.measured else {}

    def map(self, graph: Graph, given: dict[str, Value]) -> ChannelMap:
        """The transform in a graph, from the artifact's numbers or from those `given`."""
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
        raise ValueError(
            f"method '{method}' packs codes of several widths, which no graph reads yet; those that have one: "
            f"{', '.join(WITH_GRAPHS)}"
        )


def layer_of(plan: Plan, shape: Shape, wide: bool, place: Place, method: str) -> Layer:
    """Raises ValueError for a plan that quantises nothing, or whose tokens lie on the host."""
    if isinstance(plan, LayerPlan) and not plan.on_host:
        pairs: list[Any] = [plan]
    elif isinstance(plan, TieredPlan):
        pairs = list(plan.placed(place).tiers)
    else:
        pairs = []
    if not any(not isinstance(stages.codec, Exact) for pair in pairs for stages in (pair.keys, pair.values)):
        raise ValueError(
            f"method '{method}' as asked keeps tokens exactly, evicts or fetches them, and has no graph; those that have: "
            f"{', '.join(WITH_GRAPHS)}"
        )

    def stream(role: str, pair: Any) -> Stream:
        stages = getattr(pair, role)
        block = pair.page_tokens if getattr(pair, "segments", "none") == "page" else None
        writer = None if isinstance(stages.codec, Exact) else writer_of(stages.codec, shape, wide, block)
        return Stream(role, stages.transform, stages.codec, writer, shape, wide)

    names = [f"tier{number}." for number in range(len(pairs))] if len(pairs) > 1 else [""]
    tiers = (Tier(name, stream("keys", pair), stream("values", pair)) for name, pair in zip(names, pairs, strict=True))
    return Layer(tuple(tiers), shape, getattr(plan, "before_rope", False))
