"""What a method is: a frozen dataclass of options that turns one layer's geometry into the stages of that layer."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from calib.runtime.artifact.artifact import Artifact
from calib.runtime.messages.printable import printable
from calib.runtime.messages.whole_numbers import check_whole
from calib.runtime.methods.paper_counting import CountedCache
from calib.runtime.stages.contract import Codec
from calib.runtime.store import Plan


@dataclass(frozen=True)
class Geometry:
    """The part of a model's shape that a method needs: number of layers, of KV heads, and of channels of a head."""

    layers: int
    kv_heads: int
    head_dim: int

    @staticmethod
    def of(config: Any) -> "Geometry":
        """Reads the geometry from a decoder's configuration (`PretrainedConfig` of transformers)."""
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return Geometry(config.num_hidden_layers, heads, head_dim)


class Method(Protocol):
    """One paper, one file. Fields are the options with their defaults; the docstring numbers the steps.

    A method subclasses this, defines `name` and `plan`, and is in a file of `runtime/methods`, which registers it. The members
    after `plan` are optional.
    """

    @property
    def name(self) -> str:
        """The method's name, as `compress(model, name)` takes it; declared as a `ClassVar[str]`."""
        ...

    def plan(self, layer: int, geometry: Geometry, artifact: Artifact | None) -> Plan:
        """Returns the stages of attention layer `layer`; raises ValueError for options that do not fit this model or artifact."""
        ...

    # Optional.

    packs: ClassVar[tuple[type[Codec], ...]] = ()
    """The codecs with which the method may encode tokens; none if tokens are exact, evicted or fetched."""

    needs_fit: ClassVar[bool] = False
    """Whether the method needs an artifact."""

    own_corrections: ClassVar[bool] = False
    """Whether the method has correction options of its own and takes no `corrections`."""

    before_rope: ClassVar[bool] = False
    """Whether keys are always encoded as they were before RoPE, so that no fit gives what the method needs of a model whose RoPE
    cannot be undone."""

    def paper_bits(self, cache: CountedCache) -> float | None:
        """Returns bits per value as its paper counts them (`paper_counting.py`); None if it has no formula for these options."""
        return None


def check_choice(name: str, word: Any, known: Iterable[str]) -> None:
    """Raises ValueError unless `word`, the value of option `name`, is one of `known`."""
    if word not in list(known):
        raise ValueError(f"{name} must be one of {', '.join(known)}, got {printable(word)}")


def check_flag(name: str, flag: Any) -> None:
    """Raises ValueError unless `flag`, the value of option `name`, is True or False."""
    if type(flag) is not bool:
        raise ValueError(f"{name} must be True or False, got {printable(flag)}")


def check_bits(name: str, bits: Any, exact: bool = False, evicted: bool = False) -> None:
    """Raises ValueError unless `bits` is the width of a code: 1 ... 8, or 16 with `exact`, or 0 with `evicted`.

    `name` is the option's name, or says whose bits they are; it is only used in the message.
    """
    more = [*([16] if exact else []), *([0] if evicted else [])]
    if type(bits) is not int or not (1 <= bits <= 8 or bits in more):
        said = name if name.startswith("bits") else f"{name}: bits"
        raise ValueError(
            f"{said} must be a whole number {', '.join(['1 ... 8', *map(str, more)])}, got {printable(bits)}"
        )


def check_share(name: str, share: Any) -> None:
    """Raises ValueError unless `share`, the value of option `name`, is a number in (0, 1]."""
    if type(share) not in (float, int) or not 0 < share <= 1:
        raise ValueError(f"{name} must be a number in (0, 1], got {printable(share)}")


def check_amount(name: str, amount: Any, least: int = 0, remedy: str = "") -> None:
    """Raises ValueError unless `amount` is a number of tokens (int from `least`) or a share (float in [0, 1], without 0 where
    `least` is not 0). `remedy` follows the value in the message."""
    if type(amount) is not float or not 0 <= amount <= 1 or (least and not amount):
        share = "above 0, to 1.0" if least else "0.0 ... 1.0"
        check_whole(name, amount, least, f"tokens (a whole number from {least}) or a share ({share})", remedy)


def check_clip(clip: Any, name: str = "clip") -> None:
    """Raises ValueError unless `clip`, a factor on the range that is quantised, is a number in (0, 1]."""
    if type(clip) not in (float, int) or not 0 < clip <= 1:
        raise ValueError(f"{name} must be a number in (0, 1], got {printable(clip)}")
