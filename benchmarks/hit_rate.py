"""Measures the share of attention on fetched tokens: fetched by a speculative query, within the step, and kept by greedy eviction.

    python -m benchmarks.hit_rate [--cases 60] [--sequences 16] [--steps 128] [--write]

SpeCache over a 1-bit copy (g = 64) of the embedded model decodes given tokens one at a time: answers to 60 keyed lines, and after
256 tokens of text sampled from the model its greedy continuation or the further sampled tokens. In each layer the step's query is
scored against the exact keys on the host. Counted is the attention on encoded tokens, summed over heads and steps, and the share of
it on the k tokens of each KV head that

- `guess`: SpeCache fetched in the step before, by the query of the speculative token,
- `within the step`: are fetched by the same query's scores in the low-bit copy (a separate run),
- `greedy eviction`: H2O would have kept: those with the most attention so far, where a dropped token never returns,
- `best`: have the most attention.

`top` is the same share of the attention on the best k tokens. The step after a prompt is left out, as its token is not speculated.
"""

import argparse
from collections import defaultdict
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, DynamicCache, PreTrainedModel

from benchmarks.hit_rate_plot import SERIES, TASKS, plot
from benchmarks.protocol import keep, load
from calib.capture.generated import sampled_text
from calib.documents.generators import retrieval_cases
from calib.kernels.probe_saliency.reference import attention_mass
from calib.runtime import compress
from calib.runtime.cache import CompressedCache
from calib.runtime.layer import CompressedLayer
from calib.runtime.logits import Logits
from calib.runtime.offload.top_tokens import TopTokensStore

RESULT = "hit_rate.json"
PLOT = Path(__file__).parents[1] / "docs" / "results" / "specache" / "hit_rate.svg"
COPY: dict[str, Any] = {"bits": 1, "group": 64, "clip": 0.5}
FETCHED = (4, 16, 64)
LINES, PREFILL = 60, 256

Sums = dict[tuple[str, int], Tensor]  # by (series, layer): mass covered, mass; the same two for the best k tokens


class Watched:
    """Records a layer's attention while it runs; all rows must have equally many tokens, without padding."""

    def __init__(self, layer: CompressedLayer, number: int, k: int, sums: Sums) -> None:
        self.layer, self.number, self.k, self.sums = layer, number, k, sums
        self.steps = self.held = self.judged = 0
        self.received = self.kept = torch.empty(0)
        self._attend = layer.attend
        layer.attend = self  # type: ignore[method-assign]

    def __call__(self, query: Tensor, mask: Tensor | None, logits: Logits) -> Tensor:
        """Returns the layer's own output."""
        assert self.layer._arrived is not None
        keys = self.layer._arrived[0]
        if not self.held:
            self.received = attention_mass(query, keys, torch.arange(keys.shape[2]), logits.scale)
            self.held = keys.shape[2]
            return self._attend(query, mask, logits)
        store: Any = self.layer.store
        every = torch.cat([exact_keys(store, self.held), keys[:, :, :1]], 2)
        before = store.pool.positions.clone()
        output = self._attend(query, mask, logits)
        forward = self.layer.sequences.forward
        if forward is not None and forward.width:  # pre-decoding has only a speculative token
            mass = attention_mass(query[:, :, :1], every, torch.tensor([self.held]), logits.scale)
            self._step(store, mass, before if store.policy.speculative else store.pool.positions)
            self.held += 1
        return output

    def _step(self, store: Any, mass: Tensor, positions: Tensor) -> None:
        encoded = store.low.sequences.encoded(0, self.held)
        self._evict(encoded)
        self.received = torch.nn.functional.pad(self.received, (0, 1)) + mass
        self.steps += 1
        if self.steps == 1:
            return
        seen = mass[..., :encoded]
        best = chosen(seen, self.k)
        fetched = torch.zeros(*seen.shape[:2], encoded + 1, dtype=torch.bool)
        fetched = fetched.scatter_(-1, positions.long() + 1, True)[..., 1:]
        if not store.policy.speculative:
            self._add("within the step", seen, fetched, best)
            return
        for name, kept in (("guess", fetched), ("greedy eviction", self.kept), ("best", best)):
            self._add(name, seen, kept, best)

    def _evict(self, encoded: int) -> None:
        """Keeps the k tokens with the most attention, of those kept so far and those newly encoded."""
        if encoded == self.judged:
            return
        new = self.received[..., :encoded].clone()
        if self.judged:
            new[..., : self.judged].masked_fill_(~self.kept, -1)
        self.kept, self.judged = chosen(new, self.k), encoded

    def _add(self, name: str, seen: Tensor, kept: Tensor, best: Tensor) -> None:
        parts = [(seen * kept).sum(), seen.sum(), (seen * (kept & best)).sum(), (seen * best).sum()]
        self.sums[name, self.number] += torch.stack(parts).double()


def exact_keys(store: TopTokensStore, count: int) -> Tensor:
    """Returns the first `count` exact keys of every row, from host memory, `[rows, kv_heads, count, D]`."""
    pairs, table = store.host.pairs, store.host.sequences.table
    assert pairs is not None and pairs.pairs is not None
    numbers = table.numbers(torch.device("cpu"))[:, : -(-count // table.page_tokens)].long()
    return pairs.pairs[numbers].transpose(1, 2).flatten(2, 3)[:, :, :count, : pairs.widths[0]]


def chosen(mass: Tensor, k: int) -> Tensor:
    """Returns a bool mask of the k largest of `mass [..., tokens]`."""
    best = mass.topk(min(k, mass.shape[-1]), -1).indices
    return torch.zeros_like(mass, dtype=torch.bool).scatter_(-1, best, True)


@torch.no_grad()
def feed(model: PreTrainedModel, cache: CompressedCache, prompt: Tensor, rest: Tensor) -> list[Tensor]:
    """Feed a prompt `[rows, n]`, then `rest [rows, m]` one token at a time.

    Returns for each token from the third on whether it was speculated correctly, bool `[rows]`.
    """
    model(input_ids=prompt, past_key_values=cache, logits_to_keep=1)
    right, speculated = [], None
    for token in rest.split(1, 1):
        if speculated is not None:
            right.append(speculated == token[:, 0])
        # The speculative token of this step, for which it fetches, is the next step's token if the guess is right.
        speculated = None if cache.speculator is None else cache.speculator.tokens
        model(input_ids=token, past_key_values=cache)
    return right


def measure(model: PreTrainedModel, rows: Iterable[tuple[Tensor, Tensor]], k: int, speculative: bool) -> dict[str, Any]:
    """Returns the shares of each series by layer, and the shares of right guesses."""
    sums: Sums = defaultdict(lambda: torch.zeros(4, dtype=torch.float64))
    right: list[list[Tensor]] = []
    for prompt, rest in rows:
        with compress(model, "specache", k=k, speculative=speculative, **COPY) as cache:
            for number, layer in enumerate(cache.compressed):
                Watched(layer, number, k, sums)
            right.append(feed(model, cache, prompt, rest))
    found: dict[str, Any] = {}
    for name in SERIES:
        parts = [sums[key] for key in sorted(sums) if key[0] == name]
        if parts:
            covered, of, best_covered, best = torch.stack(parts).T
            found[name] = {"mass": rounded(covered / of), "top": rounded(best_covered / best)}
    return {**found, "guesses": of_guesses(right)} if right[0] else found


def of_guesses(right: list[list[Tensor]]) -> dict[str, float]:
    """Returns the share of right guesses, and with several steps also of those after a right and after a wrong guess."""
    shares = {"right": torch.cat([step for steps in right for step in steps])}
    pairs = [pair for steps in right for pair in pairwise(steps)]
    if pairs:
        before, after = (torch.cat(part) for part in zip(*pairs, strict=True))
        shares |= {"right behind a right one": after[before], "right behind a wrong one": after[~before]}
    return {name: round(share.double().mean().item(), 4) for name, share in shares.items()}


def rounded(shares: Tensor) -> list[float]:
    """Returns the shares rounded to four decimals."""
    return [round(share, 4) for share in shares.tolist()]


def answers(path: str, cases: int) -> list[tuple[Tensor, Tensor]]:
    """Returns prompts and answers of keyed lines, one row each; an answer's last token is not fed."""
    tokenizer, rows = AutoTokenizer.from_pretrained(path), []
    for case in retrieval_cases(20, cases, LINES):
        whole = tokenizer(case.prompt + case.answer, return_tensors="pt")["input_ids"]
        start = len(tokenizer(case.prompt)["input_ids"])
        rows.append((whole[:, :start], whole[:, start:-1]))
    return rows


@torch.no_grad()
def greedy(model: PreTrainedModel, prompts: Tensor, steps: int) -> Tensor:
    """Returns `steps` greedily decoded tokens after prompts `[rows, n]`, int64 `[rows, steps]`, also beyond an end of text."""
    cache, tokens, found = DynamicCache(config=model.config), prompts, []
    for _ in range(steps):
        tokens = model(input_ids=tokens, past_key_values=cache, logits_to_keep=1).logits[:, -1:].argmax(-1)
        found.append(tokens)
    return torch.cat(found, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="artifacts/tiny-llama")
    parser.add_argument("--cases", type=int, default=60)
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--steps", type=int, default=128, help="of text, after a prompt of 256 tokens")
    parser.add_argument(
        "--write", action="store_true", help=f"keep the run in benchmarks/results/{RESULT}, and its plot"
    )
    asked = parser.parse_args()
    model = load(asked.model)
    text = sampled_text(model, model.config.bos_token_id, PREFILL + asked.steps, asked.sequences, 20)
    prompts, sampled = text.split((PREFILL, asked.steps), 1)
    given = {TASKS[0]: answers(asked.model, asked.cases), TASKS[1]: [(prompts, greedy(model, prompts, asked.steps))]}
    given[TASKS[2]] = [(prompts, sampled)]
    rows: list[dict[str, Any]] = []
    for task, content in given.items():
        for k in FETCHED:
            found = measure(model, content, k, True) | measure(model, content, k, False)
            rows.append({"task": task, "k": k, **found})
            print(f"{task}, k = {k}, guesses: {found['guesses']}", flush=True)
            for name in SERIES:
                print(f"  {name:<16}", *(f"{share:6.3f}" for share in found[name]["mass"]), flush=True)
    if asked.write:
        sizes = {"cases": asked.cases, "sequences": asked.sequences, "steps": asked.steps}
        keep(RESULT, {**sizes, "copy": COPY, "rows": rows})
        PLOT.write_text(plot(rows))


if __name__ == "__main__":
    main()
