"""`calib methods [NAME]`: lists the compression methods with descriptions and options, without importing them."""

from collections.abc import Sequence

from calib.arguments import Parser
from calib.method_catalogue import Entry, catalogue, chosen, corrections

START = """\
Start with kivi at 4 bits: it needs no fit, and on the embedded model no task distinguishes it from the full cache, at a third
of the memory (docs/how_to_choose.md).
    calib generate --model FOLDER --method kivi --bits 4 --prompt-file long.txt
With a fit, klt keeps as much with fewer bits, and you give it a budget instead of single options:
    calib fit --model.path FOLDER --data.text corpus.txt
    calib generate --model FOLDER --artifact NAME.calib.safetensors --method klt --bits 2 --prompt-file long.txt
"""


def run(argv: Sequence[str]) -> int:
    """Prints first steps and a summary of each method, or the whole description of the one named in `argv`."""
    parser = Parser(prog="calib methods", description="List the compression methods and their options.")
    parser.add_argument("name", nargs="?", metavar="NAME", help="show everything about this one")
    asked = parser.parse_args(argv)
    if asked.name == "corrections":
        print(f"corrections: {corrections()}")
    elif asked.name:
        entry = chosen(asked.name)
        print(f"{entry.name} ({about(entry)}): {entry.story}")
    else:
        print(START)
        every = catalogue()
        width = max(map(len, every))
        for name, entry in every.items():
            print(f"{name:<{width}}  {entry.story.splitlines()[0]}")
            print(f"{'':<{width}}  {about(entry)}; {options(entry)}")
        print("Every method but GEAR's own and kvquant takes corrections={...} as well: `calib methods corrections`.")
    return 0


def about(entry: Entry) -> str:
    """Return in words whether the method needs a fit, and the address of its description, if any."""
    return f"{entry.fit}{f'; {entry.link}' if entry.link else ''}"


def options(entry: Entry) -> str:
    """Return the method's options with their defaults, in one line."""
    return ", ".join(f"{name}={default}" for name, default in entry.options.items()) or "no options"
