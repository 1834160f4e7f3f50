"""`calib export --format compressed-tensors`: writes a checkpoint with calibrated fp8 scales of keys and values."""

import argparse
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from calib.arguments import Parser
from calib.artifact_name import artifact_file, load_artifact, refused_as_usage
from calib.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

    from calib.export.compressed_tensors.attention_layers import AttentionLayer
    from calib.runtime import Artifact

HEADROOM = (1.0, 16.0)  # least and most; at 16, values down to 2^-10 of the calibrated range are still normal numbers


def run(argv: Sequence[str]) -> int:
    """Writes the folder and prints a summary of the scales; raises `UsageError`, `RunError` or `ArtifactError`."""
    asked = parse(argv)

    from calib.capture.language_model import without_notes
    from calib.capture.model_files import find_model
    from calib.export.compressed_tensors.attention_layers import attention_layers, model_without_weights
    from calib.export.compressed_tensors.checkpoint import Checkpoint
    from calib.export.compressed_tensors.contents import contents, weights
    from calib.export.compressed_tensors.folder import write_folder
    from calib.export.compressed_tensors.quantization import with_scales
    from calib.export.compressed_tensors.scales import named_scales

    checkpoint = Checkpoint.open(Path(find_model(asked.model)))
    config = with_scales(checkpoint, asked.granularity)
    artifact = load_artifact(asked.artifact)
    with without_notes(), refused_as_usage():
        model = model_without_weights(checkpoint)
        artifact.check(model, asked.allow_finetuned)
        layers = attention_layers(model, checkpoint)
        scales = named_scales(artifact, layers, asked.granularity, asked.headroom)
    files = contents(checkpoint, config, scales, whole=not asked.scales_only)
    links = {} if asked.scales_only else weights(checkpoint)
    if asked.copy:
        files, links = {**files, **links}, {}
    write_folder(Path(asked.output), files, links)
    for line in report(artifact, layers, scales, asked.granularity):
        print(line)
    print(f"wrote {asked.output}")
    return 0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Returns the options, after the checks that need no model."""
    parser = Parser(
        prog="calib export --format compressed-tensors",
        description="Write a checkpoint whose keys and values an engine such as vLLM stores in fp8, with calibrated scales.",
        allow_abbrev=False,
    )
    parser.add_argument("--artifact", required=True, metavar="FILE", help="what `calib fit` wrote for this model")
    parser.add_argument("--model", required=True, metavar="FOLDER", help="the model, in safetensors files")
    parser.add_argument("--output", required=True, metavar="FOLDER", help="where to write; must not be there yet")
    parser.add_argument(
        "--granularity",
        choices=("tensor", "head"),
        default="tensor",
        help="one scale for a layer's keys and one for its values (default), or one for each KV head (FlashAttention 3 in vLLM)",
    )
    parser.add_argument(
        "--headroom",
        type=float,
        default=HEADROOM[0],
        metavar="FACTOR",
        help="how far beyond the calibrated range values may go before they are cut, 1 (default) to 16",
    )
    content = parser.add_mutually_exclusive_group()
    content.add_argument(
        "--scales-only", action="store_true", help="only what differs from the model: scales, config and index"
    )
    content.add_argument("--copy", action="store_true", help="copy the weights instead of linking to the same bytes")
    parser.add_argument(
        "--allow-finetuned", action="store_true", help="take other weights of the same configuration, or quantised ones"
    )
    asked = parser.parse_args(argv)
    if not HEADROOM[0] <= asked.headroom <= HEADROOM[1]:
        raise UsageError(
            f"--headroom {asked.headroom:g}: must be from 1 to 16; below 1 it would cut what calibration saw"
        )
    asked.artifact = artifact_file(asked.artifact)
    if os.path.lexists(asked.output):
        raise UsageError(f"--output {asked.output}: is there already; remove it or name another folder")
    return asked


def report(
    artifact: "Artifact", layers: Sequence["AttentionLayer"], scales: Mapping[str, "Tensor"], granularity: str
) -> list[str]:
    """Returns lines for the user: the ranges of the scales, unmeasured layers and sliding-window layers."""
    from calib.export.compressed_tensors.scales import PARAMETERS, unmeasured

    lines = [
        f"fp8 scales of {len(layers)} attention layers, one for each {'KV head' if granularity == 'head' else 'layer'}"
    ]
    for stream, parameter in PARAMETERS.items():
        found = [scale for name, scale in scales.items() if name.endswith(f".{parameter}")]
        least, most = min(float(scale.min()) for scale in found), max(float(scale.max()) for scale in found)
        lines.append(f"  {stream:<6}  {least:.4g} to {most:.4g}")
    silent = sorted({layer.layer for layer in layers} & set(unmeasured(artifact)))
    if silent:
        lines.append(f"calibration saw no keys or no values of layers {', '.join(map(str, silent))}: their scale is 1")
    sliding = [layer.layer for layer in layers if layer.slides]
    if sliding:
        lines.append(
            f"layers {', '.join(map(str, sliding))} have a sliding window and scales as well; vLLM keeps them exact with "
            "--kv-cache-dtype-skip-layers sliding_window"
        )
    return lines
