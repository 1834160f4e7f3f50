"""Measures the gain by calibration on held-out text: attention-output error, and perplexity with the packed cache.

    python -m benchmarks.clip_table [--text FILE --natural-spacing] [--bits 2 3] [--write]

Three settings of KIVI (g = 32) at each bit width: ranges of the running text with clip 1, the same with the artifact's
clip, and calibrated statistics (key ranges and value scales from the artifact). The text is FILE, by default sequences sampled
from the model with a seed that the fit did not use. Perplexity is computed with the cache, in a prefill and then in chunks, so
that every scored token attends to compressed ones: window 32, the smallest that g = 32 allows.
"""

import argparse
import json
import platform
from pathlib import Path

import torch
import transformers
from torch.nn import functional
from transformers import PreTrainedModel

from calib.capture.capture import stream
from calib.capture.corpus import text_sequences
from calib.capture.generated import sampled_text
from calib.capture.language_model import load
from calib.capture.shape import Shape
from calib.documents.corpus import TextSource
from calib.runtime import Artifact, compress
from calib.statistics.heldout_error import HeldoutError

RESULT = Path(__file__).parent / "results" / "clip_table.json"
PAGE = Path(__file__).parents[1] / "docs/results/README.md"
MARKS = ("<!-- clip table -->", "<!-- end of clip table -->")
SETTINGS = {
    "prompt": ("ranges of the prompt, clip 1", {"clip": 1.0}),
    "clipped": ("ranges of the prompt, calibrated clip", {}),
    "calibrated": ("calibrated statistics", {"statistics": "calibrated"}),
}


@torch.no_grad()
def attention_errors(
    model: PreTrainedModel, artifact: Artifact, sequences: torch.Tensor, bits: list[int]
) -> dict[str, float]:
    """Returns the relative attention-output errors by setting, with all tokens quantised."""
    statistic = HeldoutError(Shape.of(model), artifact.clip_bits, rows=32)
    statistic.fitted = artifact.tensors
    for tokens in sequences.split(4):
        index = torch.arange(tokens.numel()).view_as(tokens)
        stream(model, tokens, torch.ones_like(tokens, dtype=torch.bool), index, statistic.observe)
    return statistic.named(statistic.overall())


@torch.no_grad()
def perplexity(
    model: PreTrainedModel, method: str, artifact: Artifact | None, sequences: torch.Tensor, **options: object
) -> tuple[float, float]:
    """Returns the perplexity of all tokens after the first quarter, and bits_per_value at the end."""
    prefill, chunk, total, count, bits = sequences.shape[1] // 4, 32, 0.0, 0, 0.0
    for tokens in sequences.split(8):
        with compress(model, method, artifact, **options) as cache:
            logits = [model(tokens[:, :prefill], past_key_values=cache).logits[:, -1:]]
            for at in range(prefill, tokens.shape[1], chunk):
                logits.append(model(tokens[:, at : at + chunk], past_key_values=cache).logits)
        predicted = torch.cat(logits, 1)[:, :-1].float()
        total += functional.cross_entropy(
            predicted.flatten(0, 1), tokens[:, prefill:].flatten(), reduction="sum"
        ).item()
        count += tokens[:, prefill:].numel()
        bits = cache.memory().bits_per_value
    return float(torch.tensor(total / count).exp()), bits


def markdown(result: dict[str, object]) -> str:
    """Returns the table of docs/results."""
    lines = [
        "| bits | setting | attention-output error | perplexity | bits per stored value |",
        "|---|---|---|---|---|",
    ]
    lines.append(f"| 16 | full cache | 0 | {result['full_perplexity']:.2f} | 16.00 |")
    lines += [
        "| {bits} | {setting} | {attention_error:.3f} | {perplexity:.2f} | {marginal_bits:.2f} |".format(**row)
        for row in result["rows"]  # type: ignore[attr-defined]
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="artifacts/tiny-llama")
    parser.add_argument("--artifact", default="artifacts/tiny-llama.calib.safetensors")
    parser.add_argument("--text", type=Path, help="held-out text; without it, text made on the spot")
    parser.add_argument(
        "--natural-spacing", action="store_true", help="take WikiText's tokenised spacing back to written English"
    )
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--bits", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--write", action="store_true", help="write the run and the table of docs/results")
    asked = parser.parse_args()
    torch.set_num_threads(2)
    model, tokenizer = load(asked.model, "float32")
    artifact = Artifact.load(asked.artifact)
    if asked.text:
        text = TextSource(text=[asked.text], natural_spacing=asked.natural_spacing).read()
        sequences = text_sequences(text, tokenizer, asked.length, asked.sequences, 1, asked.text.name)
    else:
        sequences = sampled_text(model, tokenizer.bos_token_id, asked.length, asked.sequences, seed=1)
    errors = attention_errors(model, artifact, sequences, asked.bits)
    full, _ = perplexity(model, "full", None, sequences)
    rows = []
    for bits in asked.bits:
        for name, (title, options) in SETTINGS.items():
            found, _ = perplexity(model, "kivi", artifact, sequences, bits=bits, residual=32, **options)
            with compress(model, "kivi", artifact, bits=bits, residual=32, **options) as cache:
                model(sequences[:1, :64], past_key_values=cache)
                marginal = cache.memory().marginal_bits
            error = errors[f"error_{bits}bit_{name}"]
            rows.append(
                {
                    "bits": bits,
                    "setting": title,
                    "attention_error": error,
                    "perplexity": found,
                    "marginal_bits": marginal,
                }
            )
    versions = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }
    result = {
        "text": asked.text.name if asked.text else "sampled from the model, seed 1",
        "sequences": list(sequences.shape),
        "full_perplexity": full,
        "rows": rows,
        "versions": versions,
    }
    print(markdown(result))
    if asked.write:
        RESULT.parent.mkdir(exist_ok=True)
        RESULT.write_text(json.dumps(result, indent=1) + "\n")
        before, _, rest = PAGE.read_text(encoding="utf-8").partition(MARKS[0])
        after = rest.partition(MARKS[1])[2]
        PAGE.write_text(f"{before}{MARKS[0]}\n{markdown(result)}\n{MARKS[1]}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
