"""The model shape in an artifact, for comparison with the model that an engine serves, and the codecs of its chunks."""

from typing import Any

from calib.runtime.artifact.artifact import Artifact
from calib.runtime.messages.printable import printable
from calib.runtime.storage import Codec
from calib.serve.slices import Slices


class FittedModel:
    """The model of one artifact, with codecs for one bit budget.

    Args:
        artifact: path of an artifact of `calib fit`.
        bits: the budget in bits per value, keys and values together.
        fixed_size, entropy, trellis: the options of `Codec.from_artifact`.

    Attributes:
        layers, kv_heads, head_dim: the model's shape.
        slices: the codecs, one for each slice of KV heads.
        identity: `Codec.identity` of the codec for all heads.

    Raises ArtifactError and ValueError as `Codec.from_artifact` does, so that no engine starts with an unusable artifact.
    """

    def __init__(
        self, artifact: str, bits: float, fixed_size: bool = False, entropy: bool = False, trellis: bool = False
    ) -> None:
        loaded = Artifact.load(artifact)
        found = loaded.fingerprint
        self.layers: int = found["layers"]
        self.kv_heads: int = found["kv_heads"]
        self.head_dim: int = found["head_dim"]
        self._config: dict[str, Any] = found["config"]
        self.slices = Slices(
            lambda heads: Codec.from_artifact(
                loaded, bits, heads=heads, fixed_size=fixed_size, entropy=entropy, trellis=trellis
            ),
            self.kv_heads,
        )
        self.identity = self.slices.codec(range(self.kv_heads)).identity

    def longest(self, positions: int | None) -> int:
        """Returns the tokens of the longest text: `positions`, or where it is None the model's `max_position_embeddings`.

        Raises ValueError if neither gives a whole number from 1.
        """
        found = self._config.get("max_position_embeddings") if positions is None else positions
        if type(found) is not int or found < 1:
            raise ValueError(
                f"max_position_embeddings of the artifact's model is {printable(found)}, expected a whole number from 1; give "
                'the tokens of the longest text as "positions"'
            )
        return found
