"""Measures for several saliency measures whether the line that will be asked for is among the salient tokens.

    python -m benchmarks.salient_answers [--cases 100] [--lines 20 40 60] [--write]

For keyed-line prompts of the embedded model, each layer and KV head chooses its salient tokens from the exact attention of the
prompt, by the stages that the methods use. Of the attention from the prompt's last token to the number that is asked for, the
result is the share on salient tokens, over all layers, heads and cases. A random choice would keep its share of tokens.
"""

import argparse
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from benchmarks.protocol import keep, load
from calib.documents.generators import RetrievalCase, retrieval_cases
from calib.kernels.probe_saliency.reference import attention_mass
from calib.runtime.attention import exact_attention
from calib.runtime.logits import Logits
from calib.runtime.stages.saliency import Accumulated, Normalised, Probes
from calib.runtime.stages.saliency.probes import share_of
from calib.runtime.stages.seeded_rng import SeededRng

RESULT = "salient_answers.json"
SPECIAL = (201, 16)  # ids of line end and full stop in the embedded tokenizer
SHARE = 0.6
EVERY = Probes("all")
RULES: dict[str, tuple[Any, Probes]] = {
    "normalised, all rows": (Normalised(), EVERY),
    "normalised, random + recent": (Normalised(), Probes()),
    "normalised, recent": (Normalised(), Probes("recent")),
    "normalised, random": (Normalised(), Probes("random")),
    "normalised, special": (Normalised(), Probes("special", special_ids=SPECIAL)),
    "accumulated, all rows (H2O, MiKV)": (Accumulated(), EVERY),
    "accumulated, random + recent": (Accumulated(), Probes()),
}
NAME = "calib_watched"


class Watched:
    """Queries and keys of every layer in the model's last forward."""

    def __init__(self) -> None:
        self.layers: list[tuple[Tensor, Tensor, float]] = []

    def attention(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        scaling: float,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """Computes exact attention and keeps query, keys and scale; an attention function of transformers."""
        self.layers.append((query, key, scaling))
        return exact_attention(query, key, value, None, Logits(scaling)).transpose(1, 2).contiguous(), None


def answer_tokens(tokenizer: PreTrainedTokenizerFast, case: RetrievalCase) -> tuple[Tensor, list[int]]:
    """Returns the token ids `[1, T]` of a prompt, and the positions of the number that it asks for."""
    encoded = tokenizer(case.prompt, return_tensors="pt", return_offsets_mapping=True, return_token_type_ids=False)
    question = case.prompt.rsplit("\n", 1)[1]
    start = case.prompt.index(question + case.answer) + len(question)
    spans = encoded["offset_mapping"][0].tolist()
    stop = start + len(case.answer)
    return encoded["input_ids"], [i for i, (a, b) in enumerate(spans) if a < stop and b > start]


def kept(order: Tensor, asked: Tensor, count: int) -> Tensor:
    """Returns the part of the attention `asked [kv_heads, T]` on the first `count` tokens of `order [kv_heads, T]`, and its sum."""
    return torch.stack([asked.gather(1, order[:, :count]).sum(), asked.sum()])


@torch.no_grad()
def measure(model: PreTrainedModel, watched: Watched, tokenizer: Any, cases: list[RetrievalCase]) -> dict[str, float]:
    """Returns for every rule, and for H2O's budgets, the share of the attention to the answers on the tokens kept."""
    found: dict[str, Tensor] = {}
    for case in cases:
        ids, positions = answer_tokens(tokenizer, case)
        watched.layers.clear()
        model(ids)
        for layer, (query, keys, scale) in enumerate(watched.layers):
            total = keys.shape[2]
            last = attention_mass(query[:, :, -1:], keys, torch.tensor([total - 1]), scale)[0]
            asked = torch.zeros_like(last)
            asked[:, positions] = last[:, positions]
            for name, (saliency, probes) in RULES.items():
                rows = probes.of_prompt(total, SeededRng(0, layer), ids[0])
                mass = attention_mass(query[:, :, rows], keys, rows, scale)[0]
                seen = (rows[:, None] >= torch.arange(total)).sum(0)
                order = saliency.scores(mass, seen).argsort(dim=-1, descending=True, stable=True)
                choices = {f"{name}: salient {SHARE:.0%}": (order, share_of(SHARE, total))}
                if isinstance(saliency, Accumulated) and probes is EVERY:
                    choices |= {
                        f"H2O's budget of {budget:.0%}": heavy_recent(order, budget) for budget in (0.5, 0.25, 0.2)
                    }
                for choice, (rank, count) in choices.items():
                    found[choice] = found.get(choice, torch.zeros(2)) + kept(rank, asked, count)
    return {name: round(float(part / whole), 4) for name, (part, whole) in found.items()}


def heavy_recent(order: Tensor, budget: float) -> tuple[Tensor, int]:
    """Returns H2O's order, the newest tokens of half a budget before the rest of `order [kv_heads, T]`, and the budget in
    tokens."""
    total = order.shape[1]
    half = share_of(budget / 2, total)
    older = torch.stack([row[row < total - half] for row in order])
    return torch.cat([torch.arange(total - half, total).expand(len(order), -1), older], 1), 2 * half


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="artifacts/tiny-llama")
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--lines", type=int, nargs="+", default=[20, 40, 60])
    parser.add_argument("--write", action="store_true", help=f"write {RESULT} beside the other runs")
    asked = parser.parse_args()
    watched = Watched()
    AttentionInterface.register(NAME, watched.attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    model, tokenizer = load(asked.model), AutoTokenizer.from_pretrained(asked.model)
    model.set_attn_implementation(NAME)
    rows = []
    for lines in asked.lines:
        rows.append(
            {"lines": lines, "kept": measure(model, watched, tokenizer, retrieval_cases(20, asked.cases, lines))}
        )
        print(f"{lines} lines:", *(f"  {share:.3f}  {name}" for name, share in rows[-1]["kept"].items()), sep="\n")
    if asked.write:
        keep(RESULT, {"cases": asked.cases, "rows": rows})


if __name__ == "__main__":
    main()
