"""Draws the pictures of quality: KL from the exact cache against marginal bits.

    python -m benchmarks.quality_picture

`docs/images/quality.svg` from `benchmarks/results/klt.json` (`make klt-table`), `docs/images/smollm2.svg` from
`benchmarks/results/smollm2.json` (`make smollm2-table`).
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Picture:
    """A picture of a run.

    Attributes:
        run: name of the run's file in `benchmarks/results`, without suffix.
        name: name of the picture in `docs/images`, without suffix.
        column: the run's column whose KL is drawn.
        curves: names of the run's rows, in the order of their bits, by the name of their curve.
        points: labels in the picture, by names of rows drawn as single points.
        kl: the least and the largest KL inside the frame.
    """

    run: str
    name: str
    column: str
    curves: Mapping[str, Sequence[str]]
    points: Mapping[str, str]
    kl: tuple[float, float]

    @property
    def path(self) -> Path:
        """The picture's file."""
        return HERE.parent / f"docs/images/{self.name}.svg"

    def measured(self) -> dict[str, tuple[float | None, float]]:
        """Returns marginal bits (None if unknown) and KL of every method of the run."""
        cells = json.loads((HERE / f"results/{self.run}.json").read_text())["cells"]
        return {
            cell["name"]: (cell["sizes"]["marginal_bits"], cell["figures"]["kl"])
            for cell in cells
            if cell["column"] == self.column
        }


PICTURES = (
    Picture(
        "klt",
        "quality",
        "agreement",
        {
            "klt (calibrated)": ["klt-0.75", "klt-1", "klt-1.25", "klt-1.5", "klt-2", "klt-2.25", "klt-3", "klt-4"],
            "KIVI": ["kivi-1", "kivi-2", "kivi-4"],
        },
        {
            "rtn-2": "round to nearest, 2 bits",
            "zipcache-80": "ZipCache, 80 % salient",
            "mikv-4-2": "MiKV, 4 and 2 bits",
            "gear-l-2": "GEAR-L, 2 bits",
            "csr-6-int4": "CSR-6, 4-bit coefficients",
        },
        (3e-4, 0.5),
    ),
    Picture(
        "smollm2",
        "smollm2",
        "agreement on Wikipedia",
        {
            "klt": ["klt-1-trellis", "klt-1.5-trellis", "klt-2-trellis", "klt-3-trellis"],
            "klt, components alone": ["klt-1", "klt-1.5", "klt-2", "klt-3"],
            "KIVI": ["kivi-2", "kivi-3", "kivi-4"],
            "TurboQuant": ["turboquant-2", "turboquant-3", "turboquant-4"],
            "KVQuant": ["kvquant-2", "kvquant-3", "kvquant-4"],
        },
        {
            "rtn-4": "round to nearest, 4 bits",
            "zipcache-60": "ZipCache, 60 % salient",
            "mikv-4-2": "MiKV, 4 and 2 bits",
            "kvarn-2": "KVarN, 2 bits",
            "kvarn-4-2": "KVarN, 4 and 2 bits",
            "oscar-2": "OSCAR, 2 bits",
            "csr-6-int4": "CSR-6, 4-bit coefficients",
        },
        (2e-3, 1.0),
    ),
)
COLOURS = ("#0b6e4f", "#b23a48", "#6a4c93", "#b06000", "#1f5fa8")
GREY = "#555"

WIDTH, HEIGHT = 760, 400
LEFT, RIGHT, TOP, BOTTOM = 70, 740, 16, 346
MOST_BITS = 5.5


def x_of(bits: float) -> float:
    """Returns the x coordinate of `bits`, linear."""
    return LEFT + bits / MOST_BITS * (RIGHT - LEFT)


def y_of(kl: float, ends: tuple[float, float]) -> float:
    """Returns the y coordinate of `kl`, logarithmic between `ends`."""
    low, high = map(math.log, ends)
    return BOTTOM - (math.log(kl) - low) / (high - low) * (BOTTOM - TOP)


def lines(picture: Picture) -> Iterator[str]:
    """Yields the lines of the picture as SVG."""
    found = {
        name: (x_of(bits), y_of(kl, picture.kl))
        for name, (bits, kl) in picture.measured().items()
        if kl and bits is not None
    }
    yield f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="13">'
    yield f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>'
    for bits in range(6):
        x = x_of(bits)
        yield f'<path d="M{x:.1f} {TOP}V{BOTTOM}" stroke="#e4e4e4"/>'
        yield f'<text x="{x:.1f}" y="{BOTTOM + 18}" text-anchor="middle" fill="#333">{bits}</text>'
    for kl in (kl for kl in (0.001, 0.01, 0.1) if kl > picture.kl[0]):
        y = y_of(kl, picture.kl)
        yield f'<path d="M{LEFT} {y:.1f}H{RIGHT}" stroke="#e4e4e4"/>'
        yield f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end" fill="#333">{kl:g}</text>'
    middle = (LEFT + RIGHT) / 2, (TOP + BOTTOM) / 2
    yield (
        f'<text x="{middle[0]:.0f}" y="{HEIGHT - 12}" text-anchor="middle" fill="#333">'
        "marginal bits per value, with all parameters (16-bit cache: 16)</text>"
    )
    yield (
        f'<text transform="translate(18 {middle[1]:.0f}) rotate(-90)" text-anchor="middle" fill="#333">'
        "KL from the exact cache, nats per token (lower is better)</text>"
    )
    for (name, members), colour in zip(picture.curves.items(), COLOURS, strict=False):
        spots = [found[member] for member in members]
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in spots)
        yield f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2"/>'
        yield from (f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>' for x, y in spots)
        (x, y), *_ = spots
        yield f'<text x="{x + 9:.1f}" y="{y - 5:.1f}" fill="{colour}" font-weight="bold">{name}</text>'
    for member, name in picture.points.items():
        x, y = found[member]
        yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{GREY}"/>'
        side, anchor = (x + 8, "start") if x < 0.85 * RIGHT else (x - 8, "end")
        yield f'<text x="{side:.1f}" y="{y + 4:.1f}" text-anchor="{anchor}" fill="{GREY}">{name}</text>'
    yield "</svg>"


if __name__ == "__main__":
    for picture in PICTURES:
        picture.path.parent.mkdir(parents=True, exist_ok=True)
        picture.path.write_text("\n".join(lines(picture)) + "\n")
        print(picture.path)
