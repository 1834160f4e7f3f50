"""A small fit for shards of it, and the check that theirs is the artifact of one machine."""

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
# As in test_scale_processes.py: sums of the same numbers in another order, and what is rounded in bases made of them.
SUMS, EDGES = 1e-12, 1e-3
EXACT = ("keys.low", "keys.high", "values.low", "values.high", "values.scale", "keys.balancer", "outliers.", ".clip.")


def words(toy: Path, *more: str) -> list[str]:
    return [f"--model.path={toy / 'llama'}", f"--data.text={toy / 'text.txt'}", *SMALL, *more]


def check_equal(mine: Artifact, theirs: Artifact, moments: dict[str, torch.Tensor] | None = None) -> None:
    """Of one machine and of shards: the same bits, but for what is read off float64 sums over batches.

    The first layer's values are of 16 dimensions, one for each token of the toy: the others of a rotation are free, and the
    `moments` that it is made of must be the same in its coordinates.
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
