"""The profiles of chunks: "heads", each head coded by itself as in a cache, or "storage", all heads of a layer coded together and
predicted from the layer before.

A cache's codes are read in every step. A chunk is decoded once when it is loaded, so that decoding may take more work and the codes
fewer bytes.
"""

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from calib.runtime.artifact.artifact import Artifact
from calib.runtime.artifact.component_bits import ROLES, Allocation
from calib.runtime.artifact.component_widths import widths_at
from calib.runtime.artifact.components import Coding
from calib.runtime.artifact.transform_tensors import STORAGE
from calib.runtime.methods.contract import check_choice
from calib.runtime.methods.klt import Klt
from calib.runtime.storage.heads import of_heads
from calib.runtime.storage.joint_layer import JOINT, JointLayerCoder
from calib.runtime.storage.layer import LayerCoder

PROFILES = ("heads", "storage")

LayerCoders: TypeAlias = Sequence[LayerCoder | JointLayerCoder]


class Coders(NamedTuple):
    """The coders of a model's layers, the coding that names their tensors, and the allocation of bits."""

    coding: Coding
    allocation: Allocation
    layers: LayerCoders


def profile_of(asked: str | None, artifact: Artifact, klt: Klt, heads: range) -> str:
    """Returns the profile `asked`; for None "storage" if the artifact and the other options allow it, else "heads".

    Raises ValueError for another name, and for "storage" with options that exclude it; ArtifactError if the artifact has no
    tensors for it.
    """
    name, whole = f"{STORAGE[0]}.basis", len(heads) == artifact.fingerprint["kv_heads"]
    if asked is None:
        as_it_comes = klt.size is None and klt.predict is None and not klt.trellis
        return "storage" if artifact.has(name) and whole and as_it_comes else "heads"
    check_choice("profile", asked, PROFILES)
    if asked == "storage" and not whole:
        raise ValueError(
            f"profile='storage' with heads={heads}: its bases cover all KV heads of a layer, "
            f"{range(artifact.fingerprint['kv_heads'])}; for the heads of one rank use profile='heads'"
        )
    if asked == "storage" and (klt.size is False or klt.predict is False):
        raise ValueError(
            f"profile='storage' with size={klt.size}, predict={klt.predict}: it always uses both; leave them out"
        )
    if asked == "storage" and klt.trellis:
        raise ValueError("profile='storage' with trellis=True: its levels are uniform; leave one of them out")
    if asked == "storage":
        artifact.tensor(name)
    return asked


def check_entropy(profile: str, artifact: Artifact, klt: Klt, heads: range) -> None:
    """Raises ValueError for a chosen profile that has no entropy coder; the message says why it was not "storage"."""
    if profile == "storage":
        return
    count = artifact.fingerprint["kv_heads"]
    if klt.trellis:
        why = "which has no trellis, got trellis=True; leave one of them out"
    elif len(heads) < count:
        why = f"which codes all {count} KV heads together, got heads={heads} as a rank has; leave entropy out"
    elif not artifact.has(f"{STORAGE[0]}.basis"):
        why = "which the artifact lacks; fit with `calib fit --model.storage true`, or leave entropy out"
    else:
        why = f"got profile={profile!r}, size={klt.size}, predict={klt.predict}; leave entropy or these out"
    raise ValueError(f"entropy=True needs the profile 'storage', {why}")


def coders_of(profile: str, artifact: Artifact, klt: Klt, heads: range) -> Coders:
    """Returns the coders for a profile of `profile_of`, the KV heads of a chunk and the budget in `klt`."""
    sizes = artifact.fingerprint
    if profile == "storage":
        assert klt.bits is not None
        allocation = widths_at({role: artifact.tensor(JOINT.name(role, "errors")) for role in ROLES}, klt.bits)
        joint = [JointLayerCoder.of(artifact, layer, allocation) for layer in range(sizes["layers"])]
        return Coders(JOINT, allocation, joint)
    coding = klt.coding(artifact, whole_words=True)
    (allocation,) = klt.allocations(artifact, coding)
    plans = [klt.tier(layer, allocation, artifact, coding) for layer in range(sizes["layers"])]
    if len(heads) < sizes["kv_heads"]:
        plans = [of_heads(plan, heads) for plan in plans]
    return Coders(coding, allocation, [LayerCoder(plan) for plan in plans])
