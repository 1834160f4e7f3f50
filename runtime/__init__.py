"""The runtime: builds a compressed cache from a model, the name of a method and an artifact.

from calib.runtime import Artifact, compress
"""

from calib.runtime.artifact.artifact import Artifact, ArtifactError
from calib.runtime.compress import compress
from calib.runtime.memory import Memory
from calib.runtime.prefix.prefix import PrefixError
from calib.runtime.special_tokens import special_token_ids
from calib.runtime.storage import BlobError, Codec

__all__ = ["Artifact", "ArtifactError", "BlobError", "Codec", "Memory", "PrefixError", "compress", "special_token_ids"]
