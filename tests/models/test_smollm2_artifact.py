"""The committed artifact of SmolLM2 135M: small, valid, and sufficient for `klt` at 3, 2, 1.5 and 1 bits."""

from pathlib import Path

import pytest

from calib.runtime import Artifact
from calib.runtime.artifact.component_bits import ROLES
from calib.runtime.methods import Geometry, build

PATH = Path(__file__).parents[2] / "artifacts" / "smollm2-135m.klt.calib.safetensors"
GEOMETRY = Geometry(layers=30, kv_heads=3, head_dim=64)


def test_it_is_small_and_of_this_model():
    assert PATH.stat().st_size < 9_000_000
    artifact = Artifact.load(PATH)
    named = {name: artifact.fingerprint[name] for name in ("layers", "heads", "kv_heads", "head_dim", "vocab_size")}
    assert named == {"layers": 30, "heads": 9, "kv_heads": 3, "head_dim": 64, "vocab_size": 49152}
    assert not any("dictionary" in name or "rotation" in name for name in artifact.tensors)


@pytest.mark.parametrize("bits", [3, 2, 1.5, 1])
@pytest.mark.parametrize("predict", [False, True])
def test_klt_is_planned_from_it_alone(bits, predict):
    """Without sizes and predictions, and with both (the default), where the sizes of a layer's three heads share a word. The
    planned words take at most the budget, and nearly all of it."""
    artifact, method = Artifact.load(PATH), build("klt", {"bits": bits} if predict else {"bits": bits, "size": False})
    assert method.coding(artifact).predict is predict
    (allocation,) = method.allocations(artifact)
    words = sum(sum(own.counts) + predict for role in ROLES for own in allocation.streams[role])
    for layer in (0, GEOMETRY.layers - 1):
        for role, stages in method.plan(layer, GEOMETRY, artifact).tiers[0].streams():
            codec = stages.codec.codec if predict else stages.codec
            assert codec.counts == allocation.streams[role][layer].counts
    values = 2 * GEOMETRY.layers * GEOMETRY.kv_heads * GEOMETRY.head_dim
    assert words * 16 / values == pytest.approx(bits, abs=0.01) and words * 16 <= bits * values
