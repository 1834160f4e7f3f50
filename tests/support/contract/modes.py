"""The table of modes: ways in which `generate()` and plain forwards use a cache, each as a function of a `Bench`.

A mode opens its caches by the bench, generates, makes checks of its own, and returns the caller's results as named tensors: token
sequences or floats. It does not depend on the kind of cache.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from toy_models import VOCABULARY, left_padded
from transformers import Cache, PreTrainedModel
from transformers.generation import BaseStreamer

NEW = 16  # tokens that a mode generates; more than half a window, so that blocks are completed while decoding
# Lengths of prompts: longer than the widest sliding window, on both sides of a page's end, all different.
ONE, TWO, THREE = [600], [645, 530], [575, 641, 502]

Inputs = dict[str, Tensor]
Outcome = dict[str, Tensor]


@dataclass
class Bench:
    """A model, its draft model, and a function that opens caches. `calls` are the columns of each of the model's forwards."""

    model: PreTrainedModel
    draft: PreTrainedModel
    open_cache: Callable[[], Cache]
    calls: list[int]

    def generate(self, inputs: Inputs, cache: Cache | None = None, **options: Any) -> Any:
        """Run `model.generate` with `cache` or a new one: greedy, NEW tokens; `options` override these settings."""
        settings = {"max_new_tokens": NEW, "do_sample": False, "return_dict_in_generate": True, **options}
        # `is None`, because an empty cache is falsy.
        return self.model.generate(**inputs, past_key_values=self.open_cache() if cache is None else cache, **settings)


def greedy_one(bench: Bench) -> Outcome:
    return {"tokens": bench.generate(left_padded(ONE)).sequences}


def greedy_ragged(bench: Bench) -> Outcome:
    return {"tokens": bench.generate(left_padded(THREE)).sequences}


def early_end(bench: Bench) -> Outcome:
    """Rows end at different steps: of the tokens of a first run, that one is the end token whose first occurrences differ most."""
    inputs = left_padded(THREE)

    def ends(tokens: Tensor, end: int) -> list[int]:
        found = [row.tolist().index(end) if end in row else NEW for row in tokens[:, max(THREE) :]]
        return [min(found), max(found)]

    first = bench.generate(inputs).sequences
    shown = sorted(set(first[:, max(THREE) :].flatten().tolist()))
    end = min(shown, key=lambda token: ends(first, token)[0] - ends(first, token)[1])
    tokens = bench.generate(inputs, eos_token_id=end, pad_token_id=0).sequences
    early, late = ends(tokens, end)
    assert early < late, "no row ended before another"
    return {"tokens": tokens}


def sampling(bench: Bench) -> Outcome:
    return {"tokens": bench.generate(left_padded(THREE), do_sample=True, temperature=0.9, top_k=0).sequences}


def several_samples(bench: Bench) -> Outcome:
    tokens = bench.generate(left_padded(TWO), do_sample=True, top_k=0, num_return_sequences=3).sequences
    assert len({tuple(row) for row in tokens.tolist()}) == 6, "samples of one prompt differ"
    return {"tokens": tokens}


def beams(bench: Bench) -> Outcome:
    found = bench.generate(left_padded(TWO), num_beams=4, num_return_sequences=2, output_scores=True)
    return {"tokens": found.sequences, "scores": found.sequences_scores}


def beam_sampling(bench: Bench) -> Outcome:
    options = {"num_beams": 4, "do_sample": True, "top_k": 0, "temperature": 0.7}
    return {"tokens": bench.generate(left_padded(TWO), **options).sequences}


def chunked_prefill(bench: Bench) -> Outcome:
    return {"tokens": bench.generate(left_padded(THREE), prefill_chunk_size=200).sequences}


def chunked_by_hand(bench: Bench) -> Outcome:
    """Forwards of uneven chunks, the first two all padding for one row; then `generate` for the rest."""
    inputs, cache = left_padded([640, 510]), bench.open_cache()
    logits = []
    for start, stop in ((0, 64), (64, 65), (65, 320), (320, 639)):
        positions = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
        with torch.no_grad():
            logits.append(
                bench.model(
                    input_ids=inputs["input_ids"][:, start:stop],
                    attention_mask=inputs["attention_mask"][:, :stop],
                    position_ids=positions[:, start:stop],
                    past_key_values=cache,
                ).logits
            )
    return {"tokens": bench.generate(inputs, cache).sequences, "logits": logits[-1]}


def turns(bench: Bench) -> Outcome:
    """Three turns with one cache; prompts of the second and third have unequal lengths, so rows have padding inside."""
    inputs, cache = left_padded(TWO), bench.open_cache()
    tokens, mask = bench.generate(inputs, cache, max_new_tokens=7).sequences, inputs["attention_mask"]
    for turn, lengths in enumerate(([9, 40], [33, 1])):
        said = left_padded(lengths, seed=turn)
        tokens = torch.cat([tokens, said["input_ids"]], 1)
        mask = torch.cat([mask, mask.new_ones(2, 7), said["attention_mask"]], 1)
        tokens = bench.generate({"input_ids": tokens, "attention_mask": mask}, cache, max_new_tokens=7).sequences
    return {"tokens": tokens}


def prompt_lookup(bench: Bench) -> Outcome:
    """Drafts from the prompt, which repeats itself, so that drafts are found from the first forward on."""
    text = left_padded([max(ONE) // 4])["input_ids"].repeat(1, 4)
    inputs = {"input_ids": text, "attention_mask": torch.ones_like(text)}
    return drafted(bench, bench.generate(inputs, prompt_lookup_num_tokens=5, max_new_tokens=2 * NEW).sequences)


def assisted(bench: Bench) -> Outcome:
    return drafted(
        bench, bench.generate(left_padded(ONE), assistant_model=bench.draft, max_new_tokens=2 * NEW).sequences
    )


def assisted_sampling(bench: Bench) -> Outcome:
    options = {"assistant_model": bench.draft, "do_sample": True, "top_k": 0, "max_new_tokens": 2 * NEW}
    return drafted(bench, bench.generate(left_padded(ONE), **options).sequences)


def drafted(bench: Bench, tokens: Tensor) -> Outcome:
    """The outcome of a mode with drafts; `drafts` are the numbers of accepted and of tried ones."""
    # Every forward has one column that is no draft, and generates one token that was no draft.
    tried, accepted = sum(bench.calls) - max(ONE) + 1 - len(bench.calls), 2 * NEW - len(bench.calls)
    assert tried > 0, "no draft was tried"
    return {"tokens": tokens, "drafts": torch.tensor([accepted, tried])}


class Heard(BaseStreamer):
    """A streamer that keeps all tokens it is given."""

    def __init__(self) -> None:
        self.parts: list[Tensor] = []
        self.ended = False

    def put(self, value: Tensor) -> None:
        self.parts.append(value.reshape(-1))

    def end(self) -> None:
        self.ended = True


def streamer(bench: Bench) -> Outcome:
    heard = Heard()
    tokens = bench.generate(left_padded(ONE), streamer=heard).sequences
    assert heard.ended and len(heard.parts) == NEW + 1
    assert torch.equal(torch.cat(heard.parts), tokens[0]), "the streamer heard other tokens"
    return {"tokens": tokens}


def outputs(bench: Bench) -> Outcome:
    """All outputs of each step that a caller can request, except attention weights, which are refused."""
    found = bench.generate(left_padded(TWO), output_scores=True, output_logits=True, output_hidden_states=True)
    assert len(found.scores) == len(found.logits) == len(found.hidden_states) == NEW
    assert found.logits[0].shape == (2, VOCABULARY) and len(found.hidden_states[0]) == 3
    # Only the last of the prompt's columns: the others may be padding.
    last = [torch.stack([state[:, -1] for state in step]) for step in found.hidden_states]
    return {
        "tokens": found.sequences,
        "scores": torch.stack(found.scores),
        "logits": torch.stack(found.logits),
        "hidden states": torch.stack(last),
    }


MODES: dict[str, Callable[[Bench], Outcome]] = {
    "greedy one row": greedy_one,
    "greedy ragged": greedy_ragged,
    "rows end early": early_end,
    "sampling": sampling,
    "several samples": several_samples,
    "beams": beams,
    "beam sampling": beam_sampling,
    "chunked prefill": chunked_prefill,
    "chunks by hand": chunked_by_hand,
    "turns": turns,
    "prompt lookup": prompt_lookup,
    "assisted": assisted,
    "assisted sampling": assisted_sampling,
    "streamer": streamer,
    "outputs": outputs,
}
