"""Measures the effect of a dictionary's size, sparsity, chunks, L_div and re-seeding on its loss: tables 3 to 6 of CSR, and more.

    python -m benchmarks.dictionary_loss [--model artifacts/tiny-llama] [--streams keys values "rotated keys"] [--write]

A dictionary for each layer, trained as by `calib fit`, for keys before RoPE and values of the embedded model on generated documents
and text, and for keys after RoPE as a comparison (figure 3). Every figure is the mean over layers of |x - x^|^2 / |x|^2 on held-out
sequences, at the best epoch.
"""

import argparse
import json
from dataclasses import replace

import torch
from torch import Tensor

from benchmarks.protocol import RESULTS, keep
from calib.capture.capture import stream
from calib.capture.data import CaptureData
from calib.capture.sample import LayerSample
from calib.neural_dict.dictionary import FIGURES, NeuralDictionary, Task
from calib.neural_dict.options import DictionaryOptions

RESULT = "dictionary_loss.json"
STREAMS = ("keys", "values", "rotated keys")
SAMPLES, HELDOUT = 32768, 4096  # vectors of a layer and stream

Vectors = dict[str, dict[int, tuple[Tensor, Tensor]]]


def vectors(path: str, seed: int = 0) -> Vectors:
    """Returns for each stream and layer training vectors, float32 `[SAMPLES, head_dim]`, and held-out, `[HELDOUT, head_dim]`."""
    data = CaptureData(path, name="generated", sequences=48, heldout_sequences=16, seed=seed)
    model, _, corpus = data.load()
    found: dict[str, dict[int, list[Tensor]]] = {name: {} for name in STREAMS}

    def observe(sample: LayerSample) -> None:
        assert sample.keys_before_rope is not None
        for name, x in zip(STREAMS, (sample.keys_before_rope, sample.values, sample.keys), strict=True):
            found[name].setdefault(sample.layer, []).append(x.transpose(1, 2).flatten(0, 2).float())

    for part in (corpus.train, corpus.heldout):
        mask = torch.ones_like(part, dtype=torch.bool)
        stream(model, part, mask, torch.arange(part.numel()).view_as(part), observe)
    draw = torch.Generator().manual_seed(seed)
    return {
        name: {
            layer: (some(train, SAMPLES, draw), some(heldout, HELDOUT, draw))
            for layer, (train, heldout) in layers.items()
        }
        for name, layers in found.items()
    }


def some(x: Tensor, count: int, draw: torch.Generator) -> Tensor:
    """Returns `count` random rows of `x`."""
    return x[torch.randperm(len(x), generator=draw)[:count]]


def trained(
    found: Vectors, name: str, atoms: int, sparsity: int, chunks: int, options: DictionaryOptions
) -> dict[str, object]:
    """Trains a dictionary for each layer of a stream; returns losses before and after, by epoch, and atoms unused in the last
    one."""
    curves, dead = [], []
    for layer, pair in found[name].items():
        samples, heldout = (x.reshape(len(x) * chunks, -1) for x in pair)
        dictionary = NeuralDictionary(Task(f"{name}.{layer}", samples, heldout, atoms, sparsity), options, 0)
        dictionary.begin()
        curve = [dictionary.losses[0].item()]
        while not dictionary.stopped:
            dictionary.train_part(0, 1)
            dictionary.end_epoch()
            curve.append(dictionary.losses[1].item())
        curves.append(curve + curve[-1:] * (options.epochs + 1 - len(curve)))
        dead.append(int(dictionary.figures[FIGURES.index("dead")]))
    mean = torch.tensor(curves).mean(0).tolist()
    row = {"stream": name, "atoms": atoms, "sparsity": sparsity, "chunks": chunks}
    row |= {"diversity": options.diversity, "reseed": options.reseed, "centroids": mean[0], "loss": mean[-1]}
    return {**row, "epochs": mean, "dead": sum(dead) / len(dead)}


def main(path: str, streams: list[str], write: bool) -> None:
    """Runs and prints every row of these streams; the other streams' rows of an existing file are kept."""
    found, options = vectors(path), DictionaryOptions()
    plain = [("keys", 512, 8, 1), ("values", 512, 4, 2)]
    sizes = [(stream, n, s, parts) for stream, _, s, parts in plain for n in (1024, 2048, 4096)]
    pairs = [("keys", 512, s, parts) for s in (4, 8) for parts in (1, 2)]
    pairs += [("values", 512, s, parts) for s in (4, 8) for parts in (1, 2, 4)]
    long = replace(options, epochs=20, patience=20)
    ablation = [
        (*one, replace(long, diversity=diversity, reseed=reseed))
        for one in [*plain, ("keys", 1024, 8, 1)]
        for diversity in (True, False)
        for reseed in (True, False)
    ]
    rotated = [("rotated keys", 512, s, 1) for s in (4, 8)]
    asked = [*((*one, options) for one in dict.fromkeys(plain + pairs)), *ablation]
    asked += [(*one, options) for one in [*sizes, *rotated]]
    rows = []
    for one in [one for one in asked if one[0] in streams]:
        rows.append(trained(found, *one))
        print(
            {key: round(x, 5) if isinstance(x, float) else x for key, x in rows[-1].items() if key != "epochs"},
            flush=True,
        )
    if write:
        before = json.loads((RESULTS / RESULT).read_text())["rows"] if (RESULTS / RESULT).exists() else []
        rows = [row for row in before if row["stream"] not in streams] + rows
        keep(RESULT, {"samples": SAMPLES, "heldout": HELDOUT, "rows": rows})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="artifacts/tiny-llama")
    parser.add_argument("--streams", nargs="+", choices=STREAMS, default=STREAMS, metavar="STREAM")
    parser.add_argument("--write", action="store_true", help=f"keep the run in benchmarks/results/{RESULT}")
    arguments = parser.parse_args()
    main(arguments.model, list(arguments.streams), arguments.write)
