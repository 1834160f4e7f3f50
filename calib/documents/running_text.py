"""Running text split into sentences, between which needles are inserted."""

import random
import re

from transformers import PreTrainedTokenizerFast

BOUNDARY = re.compile(r"(?<=[.!?]) (?=[A-Z\"(])")
LONGEST = 128  # most tokens of a sentence; longer ones are lists or tables without a full stop
AT_ONCE = 4000  # sentences tokenised at once; an encoding takes much more memory than its ids


class RunningText:
    """Consecutive sentences of a text, and the number of tokens of each.

    Args:
        tokenizer: of the model.
        text: one paragraph per line. Sentences of more than 128 tokens are left out.

    Raises:
        ValueError: the text holds no sentence.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, text: str) -> None:
        parts = sentences(text)
        sizes: list[int] = []
        for start in range(0, len(parts), AT_ONCE):
            encodings = tokenizer.backend_tokenizer.encode_batch(
                parts[start : start + AT_ONCE], add_special_tokens=False
            )
            sizes += [len(encoding.ids) for encoding in encodings]
        self.sentences = [part for part, size in zip(parts, sizes, strict=True) if 0 < size <= LONGEST]
        self.tokens = [size for size in sizes if 0 < size <= LONGEST]
        if not self.sentences:
            raise ValueError(f"the text has no sentence of at most {LONGEST} tokens to hide a needle in")

    def window(self, rng: random.Random, tokens: int) -> list[str]:
        """Returns consecutive sentences from a random one on, as many as fit into `tokens` tokens; the first follows the last."""
        return self.beginning(rng.randrange(len(self.sentences)), tokens)

    def beginning(self, index: int, tokens: int) -> list[str]:
        """Returns consecutive sentences from `index` on, as many as fit into `tokens` tokens; the first follows the last."""
        window = []
        while self.tokens[index] <= tokens:
            tokens -= self.tokens[index]
            window.append(self.sentences[index])
            index = (index + 1) % len(self.sentences)
        return window


def sentences(text: str) -> list[str]:
    """Returns the sentences of a text, each with the space before it; joined they give the text again."""
    return [
        part if position == 0 else f" {part}"
        for paragraph in text.splitlines(keepends=True)
        for position, part in enumerate(BOUNDARY.split(paragraph))
    ]
