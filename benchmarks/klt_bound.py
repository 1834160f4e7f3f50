"""Compares the error of `klt` with the least possible one for its bits, layer by layer, and its loss with the fit's prediction.

    python -m benchmarks.klt_bound [--artifact artifacts/tiny-llama.klt.calib.safetensors] [--sequences 64] [--write]

Distances are those of the predicted error (the artifact's, weighted by sensitivity) from reverse water-filling over the same
components (`calib/evaluate/rate_distortion.py`): with the words' widths as stored, with a free width for each component, and for
Gaussian components with a free width each. Losses: KL in nats per token over the last quarter of new generated sequences, as in the
fit.

    python -m benchmarks.klt_bound --codings artifacts/smollm2-135m.calib.safetensors ... [--write]

Instead, for several artifacts: the distance of components alone, with sizes, predictions and a trellis from the bound of each.
"""

import argparse
import heapq
import json
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoTokenizer

from benchmarks.protocol import RESULTS, load
from calib.capture.generated import generated_sequences
from calib.evaluate.rate_distortion import decibels, least_bits, least_error
from calib.fit.loss_curve import loss_curve
from calib.runtime import Artifact
from calib.runtime.artifact.component_bits import ROLES
from calib.runtime.artifact.components import ROPE, Coding, allocator, loss_at

BITS = (4.0, 3.0, 2.25, 2.0, 1.5, 1.25, 1.0, 0.75)
GAUSSIAN = torch.tensor([1, 0.3634, 0.1188, 0.03744, 0.01154, 0.00349, 0.00104, 0.000304, 0.0000876]).double()


def by_component(errors: Tensor, bits: float) -> float:
    """Returns the sum of `errors [n, 9]` with a free width for each component, chosen greedily at `bits` per component."""
    table, widths = errors.tolist(), [0] * len(errors)
    gains = [(row[1] - row[0], number) for number, row in enumerate(table)]
    heapq.heapify(gains)
    for _ in range(int(bits * len(table))):
        _, number = heapq.heappop(gains)
        widths[number] += 1
        if widths[number] < 8:
            row = table[number]
            heapq.heappush(gains, (row[widths[number] + 1] - row[widths[number]], number))
    return sum(row[width] for row, width in zip(table, widths, strict=True))


def distances(artifact: Artifact, bits: float, rope: str) -> dict[str, object]:
    """Returns the distances in dB, and by layer also the bits per value in excess of a code at the bound."""
    found, layers = allocator(artifact, Coding(rope)).at_bits(bits), {}
    errors = {role: artifact.tensor(Coding(rope).name(role, "errors")).double() for role in ROLES}
    for role in ROLES:
        count, heads, channels, _ = errors[role].shape
        for layer in range(count):
            words = found.streams[role][layer]
            rate = 16 * sum(words.counts) / (heads * channels)
            kept = [(words.bits_of(head) + [0] * channels)[:channels] for head in range(heads)]
            error = float(errors[role][layer].gather(-1, torch.tensor(kept)[..., None]).mean())
            variances = errors[role][layer, ..., 0].flatten()
            bound = decibels(error / least_error(variances, rate))
            layers[f"{role} {layer}"] = [round(rate, 2), round(bound, 2), round(rate - least_bits(variances, error), 2)]
    every = torch.cat([errors[role].flatten(0, 2) for role in ROLES])
    least = least_error(every[:, 0], bits) * len(every)
    return {
        "layers: bits, dB, bits in excess": layers,
        "all, dB": round(decibels(found.error / least), 2),
        "a width a component, dB": round(decibels(by_component(every, bits) / least), 2),
        "Gaussian, a width a component, dB": round(decibels(by_component(every[:, :1] * GAUSSIAN, bits) / least), 2),
    }


CODINGS = {
    "components alone": Coding("before"),
    "with sizes": Coding("before", size=True),
    "with sizes and predictions": Coding("before", size=True, predict=True),
    "and a trellis": Coding("before", size=True, predict=True, trellis=True),
}


def of_codings(artifact: Artifact, bits: float) -> dict[str, float]:
    """Returns the distance of each coding in dB from the bound of the components that it codes, all together."""
    found = {}
    for name, coding in CODINGS.items():
        energies = torch.cat(
            [artifact.tensor(coding.name(role, "errors"))[..., 0].flatten() for role in ROLES]
        ).double()
        bound = least_error(energies, bits) * len(energies)
        found[name] = round(decibels(allocator(artifact, coding).at_bits(bits).error / bound), 2)
    return found


def main() -> None:
    """Computes and prints; with --write saves the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="artifacts/tiny-llama")
    parser.add_argument("--artifact", default="artifacts/tiny-llama.klt.calib.safetensors")
    parser.add_argument("--codings", nargs="+", metavar="ARTIFACT")
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args()
    if asked.codings:
        budgets = (3.0, 2.0, 1.5, 1.0)
        of = {
            Path(name).name: {f"{bits:g} bits": of_codings(Artifact.load(name), bits) for bits in budgets}
            for name in asked.codings
        }
        print(text := json.dumps(of, indent=1))
        if asked.write:
            (RESULTS / "klt_bound_codings.json").write_text(text + "\n")
        return
    artifact, model = Artifact.load(asked.artifact), load(asked.model)
    tokens = generated_sequences(model, AutoTokenizer.from_pretrained(asked.model), 512, asked.sequences, seed=77)
    (measured,) = loss_curve(model, artifact, tokens, BITS, asked.sequences).values()
    losses = [
        {"bits": bits, "predicted": loss_at(artifact, error), "measured": loss}
        for bits, (error, loss) in zip(BITS, measured.tolist(), strict=True)
    ]
    found = {rope: {f"{bits:g} bits": distances(artifact, bits, rope) for bits in (4.0, 2.0, 1.0)} for rope in ROPE}
    text = json.dumps({"distances": found, "losses": losses}, indent=1)
    print(text)
    if asked.write:
        (RESULTS / "klt_bound.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
