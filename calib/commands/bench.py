"""`calib bench --config bench/quick.yaml`: measures the time and memory of methods, and the largest batch that fits."""

import shlex
from argparse import RawDescriptionHelpFormatter
from collections.abc import Sequence
from pathlib import Path

from calib.arguments import Parser, add_plan, check_plan
from calib.errors import UsageError

HELP = """\
Every key of the configuration can be given as a flag:
  --model --dtype --device --artifact --new_tokens --turns --baseline --memory 24GiB --threads --seed
  --methods full kivi '{name: kivi-4, method: kivi, bits: 4}'  --contexts 1024 4096  --batches 1 8
Several --config are merged from left to right. A row that does not fit into memory says so in its cell and is no failure.
"""


def run(argv: Sequence[str]) -> int:
    """Measures, writes `results.json`, `report.md` and `report.html`, prints the tables; returns 1 if a row failed."""
    parser = Parser(
        prog="calib bench",
        description="Measure methods over batches and contexts: prefill, first token, decode, memory.",
        epilog=HELP,
        formatter_class=RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config", action="append", default=[], metavar="FILE", help="such as bench/quick.yaml")
    parser.add_argument("--output", type=Path, help="folder of the results (default: runs/bench/NAME of the config)")
    add_plan(parser)
    asked, rest = parser.parse_known_args(argv)
    if not asked.config and not any(word.partition("=")[0] == "--methods" for word in rest):
        raise UsageError(
            "'--config' or '--methods' must be given, such as --config bench/quick.yaml or --methods full kivi"
        )

    from calib.bench.request_files import read_bench

    check_plan(asked)
    request = read_bench(asked.config, rest)
    if asked.plan:
        from calib.plan.bench_plan import make_bench_plan
        from calib.plan.run_command import tell_runs

        return tell_runs({"": make_bench_plan(request)}, asked.plan_json)
    output = asked.output or Path("runs") / "bench" / request.name
    if output.exists() and not output.is_dir():
        raise UsageError(f"output '{output}' is a file, expected a folder")

    from calib.bench.command import bench
    from calib.output_check import check_folder

    check_folder("--output", output)
    return bench(request, output, shlex.join(["calib", "bench", *argv]))
