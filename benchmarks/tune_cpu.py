"""Compares options tuned by layer with the best single setting at the same bits: predicted loss and measured KL.

    python -m benchmarks.tune_cpu [--text FILE] [--write]

Each method is tuned on 8 sequences that `calib fit` would generate with seed 0; KL from the full cache (task `agreement`) is
measured on text sampled with seed 1 and on FILE, if given: 128 tokens of each of 8 sequences after a prompt of 384.
"""

import argparse
import time
from pathlib import Path

from benchmarks.protocol import keep
from calib.capture.generated import generated_sequences
from calib.capture.language_model import load
from calib.evaluate.tasks import Subject as Evaluated
from calib.evaluate.tasks.agreement import Agreement
from calib.runtime import Artifact, compress
from calib.runtime.methods.tuned import with_choices
from calib.tune.candidates import candidates
from calib.tune.measure import Subject, measure
from calib.tune.result import Search
from calib.tune.tables import options

BUDGETS = (
    ("kivi", 2.5, {"residual": 32}),
    ("zipcache", 2.5, {"clip": 1.0}),
    ("zipcache", 3.0, {"clip": 1.0}),
    ("mikv", 3.0, {}),
)
TEXT = {"length": 512, "prefill": 384, "chunk": 32, "tokens": 8 * 128}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="artifacts/tiny-llama")
    parser.add_argument("--artifact", default="artifacts/tiny-llama.calib.safetensors")
    parser.add_argument("--text", help="held-out text, besides what is sampled")
    parser.add_argument("--write", action="store_true", help="write the run")
    asked = parser.parse_args()
    model, tokenizer = load(asked.model, "float32")
    artifact = Artifact.load(asked.artifact)
    subject = Subject.of(model, artifact, seed=0)
    tokens = generated_sequences(model, tokenizer, 512, 8, seed=0)
    evaluated = Evaluated(model, tokenizer, seed=1, batch_size=8, limit=None)
    texts = {"sampled": None} | ({Path(asked.text).name: asked.text} if asked.text else {})
    columns = {name: Agreement(text=text, **TEXT).columns(evaluated)[0] for name, text in texts.items()}
    rows = []
    for method, budget, given in BUDGETS:
        start = time.perf_counter()
        found = candidates(method, given, subject.layers, subject.geometry, artifact, model.dtype)
        search = Search(method, found, measure(subject, [tokens], [one.plans for one in found]))
        setting, single = search.at(budget), search.uniform(budget)
        seconds = time.perf_counter() - start
        tuned = with_choices(artifact, [search.choice(budget, setting, artifact.fingerprint["layers"], {})])
        one = {**single.chosen[0].options, **single.chosen[0].own}
        by_layer = " | ".join(options(own.own) for own in setting.chosen)
        for name, chosen, how, asked_for in (
            ("by layer", setting, f"{options(setting.chosen[0].options)}; {by_layer}", {"tuned": budget}),
            ("one setting", single, options(one), one),
        ):
            row = {"method": method, "budget": budget, "setting": name, "options": how, "bits": chosen.mean_bits}
            row |= {"loss": chosen.loss, "kl": {}, "candidates": len(found), "seconds": round(seconds, 1)}
            for title, column in columns.items():
                parts = []
                for batch in column.batches():
                    with compress(model, method, tuned, **asked_for) as cache:
                        parts.append(column.measure(cache, batch))
                figures = column.summary(parts)
                row["kl"][title] = [figures[end] for end in ("kl_low", "kl", "kl_high")]
            rows.append(row)
            measured = ", ".join(
                f"KL {title} {kl:.4f} ({low:.4f}-{high:.4f})" for title, (low, kl, high) in row["kl"].items()
            )
            print(
                f"{method} {budget:g}, {name}: {row['bits']:.3f} bits, loss {row['loss']:.4f}, {measured}; {how}",
                flush=True,
            )
    if asked.write:
        keep("tune_cpu.json", {"tuned_on": "generated, seed 0, 8 x 512 tokens", "rows": rows})


if __name__ == "__main__":
    main()
