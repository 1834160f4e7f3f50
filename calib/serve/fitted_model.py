"""What an artifact says of the model that an engine serves, and the codecs of its chunks."""

from calib.runtime.artifact.artifact import Artifact
from calib.runtime.storage import Codec
from calib.serve.slices import Slices


class FittedModel:
    """The model of one artifact, at one budget.

    Args:
        artifact: path of an artifact of `calib fit`.
        bits: the budget in bits per value, keys and values together.
        fixed_size, entropy, trellis: as `Codec.from_artifact` takes them.

    Attributes:
        layers, kv_heads, head_dim: of the model.
        positions: `max_position_embeddings` of the model.
        slices: the codecs, one for each slice of KV heads.
        identity: of all of them (`Codec.identity`).

    Raises ArtifactError and ValueError as `Codec.from_artifact` does: no engine starts with an artifact that cannot be used.
    """

    def __init__(
        self, artifact: str, bits: float, fixed_size: bool = False, entropy: bool = False, trellis: bool = False
    ) -> None:
        loaded = Artifact.load(artifact)
        found = loaded.fingerprint
        self.layers: int = found["layers"]
        self.kv_heads: int = found["kv_heads"]
        self.head_dim: int = found["head_dim"]
        self.positions: int = found["config"]["max_position_embeddings"]
        self.slices = Slices(
            lambda heads: Codec.from_artifact(
                loaded, bits, heads=heads, fixed_size=fixed_size, entropy=entropy, trellis=trellis
            ),
            self.kv_heads,
        )
        self.identity = self.slices.codec(range(self.kv_heads)).identity
