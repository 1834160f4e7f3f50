"""Options of a small fit in shards, and the check that its artifact equals that of one machine."""

from pathlib import Path

import pytest
import torch

from calib.runtime.artifact.artifact import Artifact

SMALL = [
    "--model.bits=[2]", "--model.clip_factors=[1,0.8]", "--model.query_rows=4", "--model.residual_bits=[2]",
    "--data.length=64", "--data.sequences=9", "--data.heldout_sequences=3", "--data.batch_size=2",
    "--model.clip_sequences=5", "--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false",
    "--trainer.logger=false", "--model.checkpoint_batches=1",
    "--model.dictionary.samples=300", "--model.dictionary.heldout_samples=100", "--model.dictionary.epochs=1",
    "--model.dictionary.keys_sparsity=3", "--model.dictionary.values_sparsity=2", "--model.dictionary.atoms=12",
]  # fmt: skip
# Tolerances as in test_scale_processes.py: relative, of sums of the same numbers in another order (SUMS), and of steps, errors and
# losses, which are computed in bases made from such sums (EDGES).
SUMS, EDGES = 1e-12, 1e-3
EXACT = ("keys.low", "keys.high", "values.low", "values.high", "values.scale", "keys.balancer", "outliers.", ".clip.")


def words(toy: Path, *more: str) -> list[str]:
    return [f"--model.path={toy / 'llama'}", f"--data.text={toy / 'text.txt'}", *SMALL, *more]


def check_equal(mine: Artifact, theirs: Artifact, moments: dict[str, torch.Tensor] | None = None) -> None:
    """Assert that artifacts of one machine and of shards have the same bits, but for tensors made from float64 sums over batches.

    The toy text has 16 distinct tokens, so values of the first layer span 16 dimensions and the other axes of a rotation are
    arbitrary. For rotations named in `moments`, the second moments from which they are made are compared in both coordinates.
    """
    assert mine.tensors.keys() == theirs.tensors.keys()
    for name, tensor in mine.tensors.items():
        if moments and name in moments:
            found = [R @ moments[name] @ R.mT for R in (tensor.double(), theirs.tensors[name].double())]
            largest = moments[name].abs().amax((-1, -2), keepdim=True)
            torch.testing.assert_close(found[1] / largest, found[0] / largest, rtol=0, atol=1e-6, msg=name)
            continue
        bases = any(part in name for part in (".residual.", ".klt."))
        loose = bases or name == "queries.mean_square" or ".nuq.levels." in name
        assert not (loose and any(part in name for part in EXACT))
        rtol = EDGES if name.endswith(("steps", "errors", "loss")) else 2**-22 if loose else 0
        torch.testing.assert_close(theirs.tensors[name], tensor, rtol=rtol, atol=1e-6 if loose else 0, msg=name)
    metrics = [artifact.provenance["metrics"] for artifact in (mine, theirs)]
    assert metrics[0]["dictionaries"] == metrics[1]["dictionaries"]
    for first, second in zip(*(found["layers"] for found in metrics), strict=True):
        assert second == pytest.approx(first, rel=SUMS, abs=0)
    rest = [{k: v for k, v in artifact.provenance.items() if k != "metrics"} for artifact in (mine, theirs)]
    assert rest[0] == rest[1]
