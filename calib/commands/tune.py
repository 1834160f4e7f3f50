"""`calib tune --method zipcache --bits 2.5`: chooses a method's options for a budget in bits per value."""

import os
import shlex
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from calib.arguments import Parser
from calib.artifact_name import artifact_file
from calib.commands.inspect import ENDINGS
from calib.errors import UsageError
from calib.method_options import as_usage, read_method, read_options


def run(argv: Sequence[str]) -> int:
    """Measures candidates, chooses options for each budget, writes them into the artifact and shows them."""
    from calib.runtime.methods import options_of

    asked, rest = parse(argv)
    name, options = read_method(asked.method)
    with as_usage():
        known = {option for option in options_of(name) if option not in ("corrections", "tuned", "bits")}
        options |= read_options(rest, known, name)
    for budget in asked.bits:
        if not 0 < budget <= 16:
            raise UsageError(f"--bits {budget:g} must be above 0 and at most 16 bits per value, such as 2.5")
    for option, least in (("length", 2), ("sequences", 1), ("batch_size", 1), ("rows", 1), ("context", 1)):
        if getattr(asked, option) is not None and getattr(asked, option) < least:
            raise UsageError(f"--{option} must be at least {least}, got {getattr(asked, option)}")
    source = artifact_file(asked.artifact)
    if asked.output is None and not os.path.isfile(asked.artifact):
        raise UsageError(f"--artifact {asked.artifact} is a name on the hub: give --output FILE for the tuned artifact")
    if asked.html is not None and (asked.html.suffix.lower() not in ENDINGS or asked.html.is_dir()):
        raise UsageError(f"--html {asked.html}: must name a file that ends in {ENDINGS[0]}")

    from calib.output_check import check_file, check_folder
    from calib.tune.command import Link, Request, tune

    check_file("--output", asked.output or source)
    if asked.html is not None:
        check_file("--html", asked.html)
    check_folder("--logs", asked.logs)
    request = Request(
        method=name,
        options=options,
        budgets=sorted(set(asked.bits)),
        model=asked.model,
        dtype=asked.dtype,
        device=asked.device,
        artifact=source,
        output=asked.output or source,
        html=asked.html,
        text=asked.text,
        natural_spacing=asked.natural_spacing,
        length=asked.length,
        sequences=asked.sequences,
        batch_size=asked.batch_size,
        seed=asked.seed,
        link=Link(asked.bandwidth, asked.step_ms, asked.rows, asked.context),
        logs=asked.logs,
        command=shlex.join(["calib", "tune", *argv]),
    )
    return tune(request)


def parse(argv: Sequence[str]) -> tuple[Namespace, list[str]]:
    """Returns the flags of the command, and the words that follow: the method's options."""
    parser = Parser(
        prog="calib tune",
        description="Choose a method's options for a budget, layer by layer where it allows that.",
        epilog="A method's own options follow as flags (--recompress 50); the budget does not choose those.",
        allow_abbrev=False,
    )
    parser.add_argument("--method", required=True, help="a name from `calib methods`, or a YAML file with its options")
    parser.add_argument(
        "--bits", nargs="+", type=float, required=True, help="budgets in true bits per value of the encoded tokens"
    )
    parser.add_argument("--model", default="artifacts/tiny-llama", help="folder or hub name of a causal language model")
    parser.add_argument("--artifact", required=True, help="what `calib fit` wrote for this model")
    parser.add_argument(
        "--output", type=Path, help="where the artifact with the choices goes (default: back to its file)"
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="draw the front on a page")
    parser.add_argument(
        "--text", type=Path, metavar="FILE", help="UTF-8 text to measure on (default: generated, as by `calib fit`)"
    )
    parser.add_argument(
        "--natural_spacing", action="store_true", help="take WikiText's tokenised spacing back to written English"
    )
    parser.add_argument("--length", type=int, default=512, help="tokens of a sequence")
    parser.add_argument("--sequences", type=int, default=8, help="sequences to measure on")
    parser.add_argument("--batch_size", type=int, default=8, help="sequences at once")
    parser.add_argument(
        "--seed", type=int, default=0, help="of the generated text, and of methods that use random numbers"
    )
    parser.add_argument(
        "--dtype", default="auto", help="float32, bfloat16, float16, or auto: what the weights are stored in"
    )
    parser.add_argument("--device", default="cpu", help="such as cpu or cuda")
    parser.add_argument(
        "--bandwidth",
        type=float,
        metavar="GB/S",
        help="specache: bandwidth of the link to host memory when scattered pairs are read",
    )
    parser.add_argument(
        "--step_ms",
        type=float,
        metavar="MS",
        help="specache: time of a decode step; k is the number of pairs that the link transfers in that time",
    )
    parser.add_argument("--rows", type=int, default=1, help="specache: sequences of a batch, which share the link")
    parser.add_argument(
        "--context",
        type=int,
        help="specache: tokens of a sequence, over which its k exact pairs are counted (default: the model's longest)",
    )
    parser.add_argument("--logs", type=Path, default=Path("runs/tune"), help="folder of the W&B run, or of CSV files")
    return parser.parse_known_args(argv)
