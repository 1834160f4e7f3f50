"""A row with a cache of transformers, as a baseline that is evaluated and measured in the same way as our methods."""

from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, fields
from importlib.metadata import version
from typing import Any, ClassVar

import torch
from transformers import DynamicCache, PreTrainedConfig, QuantizedCache
from transformers.cache_utils import Cache, DynamicLayer

from calib.config_messages import unknown
from calib.errors import UsageError
from calib.evaluate.cache_size import CacheSize
from calib.evaluate.entries.entry import CacheEntry, Given
from calib.evaluate.entries.quanto_build import build_folders, wait_for_builds
from calib.runtime.memory import measure
from calib.runtime.methods import Geometry


class Peer(ABC):
    """A kind of cache; its fields are its options. Building it raises ValueError or ImportError for what it refuses.

    Attributes:
        package: the package that it needs in addition to transformers; None for none.
    """

    package: ClassVar[str | None] = None

    @abstractmethod
    def build(self, config: PreTrainedConfig, device: torch.device) -> Cache:
        """Returns an empty cache."""


@dataclass(frozen=True)
class Dynamic(Peer):
    """DynamicCache: exact keys and values."""

    def build(self, config: PreTrainedConfig, device: torch.device) -> Cache:
        return DynamicCache(config=config)


@dataclass(frozen=True)
class Offloaded(Peer):
    """DynamicCache with offloading: layers are in host memory, and the next layer is prefetched."""

    def build(self, config: PreTrainedConfig, device: torch.device) -> Cache:
        if device.type != "cuda":
            raise ValueError(f"peer 'offloaded' moves layers off a GPU, got device={device.type}; leave the row out")
        return DynamicCache(config=config, offloading=True)


@dataclass(frozen=True)
class Quantized(Peer):
    """QuantizedCache of transformers.

    Attributes:
        bits: bits of a code.
        group: number of values that share a scale.
        residual: most exact tokens (`residual_length`); beyond it, all tokens are quantised again.
        axis: axis of the groups, for keys and values; None: the one that the backend's documentation advises.
    """

    backend: ClassVar[str]
    advised: ClassVar[int]

    bits: int = 4
    group: int = 64
    residual: int = 128
    axis: int | None = None

    def build(self, config: PreTrainedConfig, device: torch.device) -> Cache:
        axis = self.advised if self.axis is None else self.axis
        numbers = {"nbits": self.bits, "q_group_size": self.group, "residual_length": self.residual}
        return QuantizedCache(self.backend, config, axis_key=axis, axis_value=axis, **numbers)


class Quanto(Quantized):
    """QuantizedCache with optimum-quanto."""

    backend, advised, package = "quanto", 0, "optimum-quanto"

    def build(self, config: PreTrainedConfig, device: torch.device) -> Cache:
        wait_for_builds(build_folders())
        return super().build(config, device)


class HQQ(Quantized):
    """QuantizedCache with hqq."""

    backend, advised, package = "hqq", 1, "hqq"


PEERS: dict[str, type[Peer]] = {"dynamic": Dynamic, "offloaded": Offloaded, "quanto": Quanto, "hqq": HQQ}


@dataclass(frozen=True)
class PeerEntry(CacheEntry):
    """`{peer: quanto, bits: 4}`.

    Attributes:
        peer: a name of `PEERS`.
    """

    peer: str

    def __post_init__(self) -> None:
        if self.peer not in PEERS:
            raise UsageError(unknown(f"peer {self.peer}", [f"peer {name}" for name in PEERS]))
        known = [field.name for field in fields(PEERS[self.peer])]
        for option in self.options:
            if option not in known:
                raise UsageError(unknown(f"{self.peer}.{option}", [f"{self.peer}.{name}" for name in known]))

    @property
    def method(self) -> str:
        return f"peer {self.peer}"

    @property
    def packages(self) -> dict[str, str]:
        package = PEERS[self.peer].package
        return {} if package is None else {package: version(package)}

    def all_options(self, title: str) -> dict[str, Any]:
        with self.refusing():
            return asdict(PEERS[self.peer](**self.options_for(title)))

    def open(self, given: Given, title: str) -> Cache:
        config = given.model.config.get_text_config(decoder=True)
        return PEERS[self.peer](**self.options_for(title)).build(config, given.model.device)

    def close(self, cache: Cache) -> None:
        """Do nothing: these caches do not change the model."""

    def cache_size(self, given: Given, cache: Cache, tokens: int) -> CacheSize:
        everything = measure(cache)
        held = measure(cache, given.model.device)
        config = given.model.config.get_text_config(decoder=True)
        values = tokens * values_of_token(config)
        # With sliding-window layers the bytes of a DynamicCache depend on the length of each row, which is not known here.
        dynamic = None if any(slides(config)) else values * given.model.dtype.itemsize
        return CacheSize(held, values, host_bytes=everything - held, dynamic_bytes=dynamic)


def values_of_token(config: PreTrainedConfig) -> int:
    """Number of key and value elements of one token in the layers that our methods compress, as in `Memory.bits_per_value`: the
    full-attention layers, or all layers if all of them slide."""
    shape, sliding = Geometry.of(config), slides(config)
    return 2 * shape.kv_heads * shape.head_dim * (sliding.count(False) or len(sliding))


def slides(config: PreTrainedConfig) -> list[bool]:
    """Returns for each layer whether transformers keeps only a sliding window of it."""
    layers: list[Any] = list(DynamicCache(config=config).layers)
    return [type(layer) is not DynamicLayer for layer in layers]
