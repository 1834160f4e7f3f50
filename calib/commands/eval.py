"""`calib eval --config eval/importance.yaml`: measures the quality of a model's answers with each method, and its bits."""

import shlex
from argparse import Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from pathlib import Path

from calib.arguments import Parser, add_plan, check_plan
from calib.errors import UsageError
from calib.interrupts import goes_on_with

HELP = """\
Every key of the configuration can be given as a flag:
  --model --dtype --device --artifact --seed --batch_size --limit --threads --products
  --tasks.retrieval.cases 50  --tasks.perplexity.text FILE      in every task of that name
Several --config are merged from left to right. Finished cells are kept below the output folder and not run again.
--reuse RUN.json copies the cells of an earlier run that have the same model, data, options and versions.
--compare OLD.json adds what has changed since that run; --compare OLD.json NEW.json compares two files and runs nothing.
"""


def run(argv: Sequence[str]) -> int:
    """Evaluates, writes `results.json`, `report.md` and `report.html`, prints the table; returns 1 if a cell failed."""
    asked, rest = parse(argv)
    if len(asked.compare) > 2 - bool(asked.config):
        wanted = "one file with --config, two without"
        raise UsageError(f"'--compare' got {len(asked.compare)} files, expected {wanted}")
    if len(asked.compare) == 2 and len(argv) == 3:  # no other flag, as it would have no effect
        from calib.evaluate.command import compare_files

        return compare_files(*asked.compare)
    if asked.reuse is not None and (asked.fresh or asked.write_cases is not None):
        other = "--fresh" if asked.fresh else "--write-cases"
        raise UsageError(f"'--reuse' copies finished cells, which '{other}' does not use; give one of them")
    if not asked.config:
        raise UsageError("'--config' must be given, such as eval/importance.yaml or eval/quick.yaml")

    from calib.evaluate.request_files import read_requests

    check_plan(asked, "--fresh", "--reuse", "--compare", "--write-cases", "--bench")
    requests = read_requests(asked.config, rest)
    if asked.plan:
        from calib.plan.eval_plan import make_eval_plan
        from calib.plan.run_command import tell_runs

        return tell_runs({name: make_eval_plan(one, asked.only) for name, one in requests.items()}, asked.plan_json)
    request = next(iter(requests.values()))
    output = asked.output or Path("runs") / "eval" / request.name
    if output.exists() and not output.is_dir():
        raise UsageError(f"output '{output}' is a file, expected a folder")

    from calib.evaluate.command import evaluate, evaluate_models, write_cases
    from calib.output_check import check_file, check_folder

    if asked.write_cases is None:
        check_folder("--output", output)
    command = shlex.join(["calib", "eval", *argv])
    if "" not in requests:
        given = {
            "--compare": asked.compare,
            "--reuse": asked.reuse,
            "--write-cases": asked.write_cases,
            "--bench": asked.bench,
        }
        if alone := next((name for name, value in given.items() if value), None):
            raise UsageError(f"'{alone}' is of one model, and the configuration names {len(requests)}; give --model")
        goes_on_with()
        return evaluate_models(requests, output, asked.only, asked.fresh, command)
    if asked.write_cases is not None:
        if asked.write_cases.is_dir():
            raise UsageError(f"--write-cases '{asked.write_cases}' is a folder, expected a file to write")
        check_file("--write-cases", asked.write_cases)
        return write_cases(request, asked.write_cases)
    old, drawn = next(iter(asked.compare), None), None
    if asked.bench is not None:
        from calib.bench.page import curves_for
        from calib.bench.run_file import read_bench_run

        drawn = curves_for(read_bench_run(asked.bench))
    goes_on_with()
    return evaluate(request, output, asked.only, asked.fresh, command, old, drawn, asked.reuse)


def parse(argv: Sequence[str]) -> tuple[Namespace, list[str]]:
    """Returns the flags of the command, and the words that are keys of the configuration."""
    parser = Parser(
        prog="calib eval",
        description="Measure methods on tasks through their caches: quality and true bits.",
        epilog=HELP,
        formatter_class=RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config", action="append", default=[], metavar="FILE", help="such as eval/importance.yaml")
    parser.add_argument("--output", type=Path, help="folder of the results (default: runs/eval/NAME of the config)")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="rows to run, by name or pattern (h2o*)")
    parser.add_argument("--fresh", action="store_true", help="measure finished cells again")
    parser.add_argument(
        "--reuse", metavar="FILE", help="results.json of an earlier run; copy its cells with equal inputs"
    )
    parser.add_argument("--compare", nargs="+", default=[], metavar="FILE", help="results.json of an earlier run")
    parser.add_argument(
        "--write-cases", type=Path, metavar="FILE", help="write the cases for another library; run nothing"
    )
    parser.add_argument(
        "--bench", metavar="FILE", help="results.json of `calib bench`, whose curves go on the page as well"
    )
    add_plan(parser)
    return parser.parse_known_args(argv)
