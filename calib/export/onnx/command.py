"""`calib export --format onnx`: writes a method's encoding, decoding and attention step as ONNX files in one folder."""

import argparse
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calib.arguments import Parser
from calib.artifact_name import artifact_file, load_artifact
from calib.errors import RunError, UsageError
from calib.method_options import as_usage, read_method, read_options

if TYPE_CHECKING:
    from calib.export.onnx.models import Request
    from calib.runtime.methods import Geometry

MISSING = "calib export --format onnx needs the package onnx: pip install 'calib-kv[export]'"


def run(argv: Sequence[str]) -> int:
    """Writes the graphs of one layer, or of all, and prints the inputs and outputs of each."""
    parser = Parser(
        prog="calib export --format onnx",
        description="Write a method's encode, decode and attend graphs, with the artifact's numbers in them.",
        epilog="A method's own options follow as flags (--bits 2 --group 32); `calib methods NAME` lists them.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--artifact", help="what `calib fit` wrote; says how many layers, KV heads and channels there are"
    )
    parser.add_argument("--model", help="without an artifact: folder or hub name of the model, for its shape")
    parser.add_argument(
        "--method", default="kivi", help="a method, or a YAML file that holds `method:` and its options"
    )
    parser.add_argument("--layer", type=int, help="one attention layer, counted from 0; all of them where left out")
    parser.add_argument("--output", required=True, help="the folder for the .onnx files; may hold other layers' graphs")
    parser.add_argument("--seed", type=int, default=0, help="the cache's seed: where power iterations start")
    parser.add_argument(
        "--wide",
        action="store_true",
        help="keep scales, zero points and the like in float32, for keys or values beyond 65504",
    )
    asked, rest = parser.parse_known_args(argv)
    try:
        import onnx  # noqa: F401
    except ImportError as error:
        raise UsageError(MISSING) from error
    request = read_request(asked, rest)
    layers = request.geometry.layers
    if asked.layer is not None and not 0 <= asked.layer < layers:
        raise UsageError(f"--layer must be 0 ... {layers - 1}, got {asked.layer}")
    chosen = range(layers) if asked.layer is None else [asked.layer]
    check_free(asked.output, chosen)
    return write(request, chosen, Path(asked.output))


def check_free(output: str, layers: Sequence[int]) -> None:
    """Raises UsageError if the folder `output` has graphs of one of `layers`: another method's would be replaced, or mixed with."""
    folder = Path(os.path.realpath(output))  # because `missing/../a` is written as `a`
    for layer in layers:
        for found in sorted(folder.glob(f"layer{layer}.*.onnx")):
            raise UsageError(
                f"--output {output}: {found.name} exists already; choose a folder without graphs of layer {layer}"
            )


def read_request(asked: argparse.Namespace, rest: Sequence[str]) -> "Request":
    """Returns the request: method, options, artifact and model shape. Raises UsageError before any file is written."""
    from calib.export.onnx.models import Request
    from calib.runtime.methods import Geometry, options_of

    name, options = read_method(asked.method)
    with as_usage():
        options |= read_options(rest, set(options_of(name)), name)
    if (asked.artifact is None) == (asked.model is None):
        raise UsageError(
            "give either --artifact FILE or --model FOLDER: one of them says how many layers, KV heads and channels there are"
        )
    artifact, sha256 = None, ""
    if asked.artifact is not None:
        path = artifact_file(asked.artifact)
        artifact, sha256 = load_artifact(path), hashlib.sha256(path.read_bytes()).hexdigest()
        geometry = Geometry(*(artifact.fingerprint[field] for field in ("layers", "kv_heads", "head_dim")))
    else:
        geometry = geometry_of(asked.model)
    return Request(name, options, artifact, sha256, geometry, asked.seed, asked.wide)


def geometry_of(model: str) -> "Geometry":
    """Returns the shape in a model's configuration, without reading weights; raises UsageError if there is none."""
    from transformers import AutoConfig

    from calib.capture.model_files import ModelFiles
    from calib.capture.model_sizes import check_sizes
    from calib.runtime.methods import Geometry

    try:
        found = ModelFiles.find(model)
        config = AutoConfig.from_pretrained(found.path, **found.options)
        check_sizes(config, model)
        return Geometry.of(config.get_text_config(decoder=True))
    except UsageError:
        raise
    except Exception as error:  # transformers raises many types; all mean that the configuration cannot be read
        raise UsageError(
            f"--model {model}: no configuration of a model could be read ({type(error).__name__})"
        ) from error


def write(request: "Request", layers: Sequence[int], folder: Path) -> int:
    """Builds and checks the models of all layers, then writes each atomically and prints its inputs and outputs."""
    from calib.runtime.files.atomic_file import write_atomically

    models: dict[str, Any] = {}
    with as_usage():
        for layer in layers:
            models |= request.models(layer)
    for name, model in models.items():
        path = folder / f"{name}.onnx"
        try:
            write_atomically(path, model.SerializeToString(deterministic=True))
        except OSError as error:
            raise RunError(
                f"{path}: cannot be written ({error.strerror}); choose a folder with room and write permission"
            ) from error
        print(path)
        for title, values in (("in", model.graph.input), ("out", model.graph.output)):
            print(f"    {title:<4}" + "\n        ".join(map(described, values)))
    opset = next(iter(models.values())).opset_import[0].version
    print(f"{len(models)} graphs of {len(layers)} layer{'s' * (len(layers) > 1)}, opset {opset}")
    return 0


def described(value: Any) -> str:
    """Returns an input or output in words, such as `keys float [batch, 2, tokens, 64]`."""
    import onnx

    kind = value.type.tensor_type
    dims = ", ".join(dim.dim_param or str(dim.dim_value) for dim in kind.shape.dim)
    return f"{value.name} {onnx.TensorProto.DataType.Name(kind.elem_type).lower()} [{dims}]"
