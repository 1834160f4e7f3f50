"""Compares the bytes at equal KL of `Codec`'s profiles for stored chunks, and of the steps from separate to joint heads and layers.

    python -m benchmarks.storage_profile --model FOLDER --fit wiki.valid.raw --text Wikipedia=wiki.test.raw \\
        code=HumanEval.jsonl.gz stories=tinystories_valid_head.txt [--bits 3 2 1.5 1 0.5] [--forms] [--write]

FOLDER is SmolLM2 135M as `make smollm2-model` writes it, or another model. All codes are fitted on the same sequences of the text
of `--fit` with the same weights of errors, those of `calib fit`. `Codec` is its profile "heads", with sizes and predictions,
`Codec, storage` the profile "storage", and `Codec, entropy` that with an entropy coder, which decodes to the same chunk.

With `--forms` the forms of `joint_codes.py` replace all profiles but `Codec`. They are fitted for every budget separately, unlike
an artifact, and so show the largest possible gain of each step. `one fit` is the last form fitted only at 1.5 bits and used at
every budget.

A prefix of every text, which no fit has read, is stored and read back except its first 4 tokens, which are exact in all forms.
The model's predictions at the next tokens are compared with those after the uncompressed prefix, in float32: `kl` in nats per
token, and `same`, the share of tokens with the same most likely next token. `answers` is the share of right answers to questions
for twenty numbers hidden in prefixes of the first text; an answer is right if every digit is the most likely token. Bytes are
those of a token's codes and sizes, by text, without the prefix's header and exact tokens. `share` is bytes over `Codec`'s at the
same KL, interpolated between budgets linearly in the logarithms of KL and bytes.
"""

import argparse
import gzip
import json
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoTokenizer, DynamicCache, PreTrainedModel

from benchmarks.joint_codes import FORMS, Codes, Form
from benchmarks.protocol import keep, load
from calib.capture.capture import stream
from calib.capture.gradients import stream_gradients
from calib.capture.output_projection import output_weights
from calib.capture.sample import SINKS, LayerSample
from calib.capture.shape import Shape
from calib.runtime import Artifact, Codec
from calib.runtime.artifact.fingerprint import fingerprint
from calib.runtime.rotation import Rotation
from calib.statistics.components import Components
from calib.statistics.contract import tokens_of
from calib.statistics.second_moments import SecondMoments
from calib.statistics.sensitivity import Sensitivity
from calib.statistics.storage_codes import StorageCodes
from calib.statistics.transform_basis import bases, errors_weight
from calib.statistics.transformed_streams import coded, vectors

RESULT, FORMS_RESULT = "storage_profile", "storage_forms"  # prefixes of the file names, one file per model
PROFILES: dict[str, dict[str, object]] = {
    "Codec": {"profile": "heads"},
    "Codec, trellis": {"profile": "heads", "trellis": True},
    "Codec, storage": {"profile": "storage"},
    "Codec, entropy": {"profile": "storage", "entropy": True},
}
LENGTH, PREFIX, QUESTION = 512, 512, 128
BATCH = 8
WORDS = ("rain", "wood", "iron", "salt", "glass", "wool", "sand", "coal", "milk", "gold")
HIDDEN = 20  # hidden numbers, at depths from the first to the last token
ONCE = 1.5  # bits of `one fit`
EVERY = 2  # the forms are fitted on one token in so many


def text_of(path: Path) -> str:
    """Returns a file's text; of HumanEval the prompts with their solutions, of TinyStories the stories without separators."""
    if path.suffix == ".gz":
        rows = map(json.loads, gzip.decompress(path.read_bytes()).decode().splitlines())
        return "\n\n".join(row["prompt"] + row["canonical_solution"] for row in rows)
    return path.read_text().replace("<|endoftext|>", "")


def sequences(tokenizer: object, path: Path, length: int, count: int) -> Tensor:
    """Returns token sequences, int64 `[count, length]`, evenly spread over the text."""
    ids = tokenizer(text_of(path), return_tensors="pt").input_ids[0]  # type: ignore[operator]
    starts = torch.linspace(0, len(ids) - length, count).long()
    return torch.stack([ids[start : start + length] for start in starts.tolist()])


def hidden(tokenizer: object, path: Path) -> Iterator[tuple[Tensor, int]]:
    """Yields rows `[1, PREFIX + n]` of a text, and the number's tokens.

    A number is hidden in the first PREFIX tokens; the last n tokens are the question and the number.
    """

    def ids(words: str) -> Tensor:
        return tokenizer(words, return_tensors="pt", add_special_tokens=False).input_ids  # type: ignore[operator]

    draw, rows = torch.Generator().manual_seed(0), sequences(tokenizer, path, PREFIX, HIDDEN)
    for case, row in enumerate(rows):
        said = f"The number of {WORDS[case % len(WORDS)]} is"
        number = ids(f" {int(torch.randint(1000, 10000, (), generator=draw))}")
        needle = torch.cat([ids(f"\n{said}"), number, ids(".\n")], 1)
        at = (PREFIX - needle.shape[1]) * case // (HIDDEN - 1)
        before, after = row[None, :at], row[None, at : PREFIX - needle.shape[1]]
        yield torch.cat([before, needle, after, ids(f"\n?\n{said}"), number], 1), number.shape[1]


class Fit:
    """The data of all fits: `tokens [layers, 2, n, width]`, `weights [layers, 2, heads, D, D]` of errors, and the `artifact`."""

    def __init__(self, model: PreTrainedModel, ids: Tensor, differentiated: int, profile: bool) -> None:
        shape, self.rotation = Shape.of(model), Rotation.of(model, "")
        moments, sensitivity = SecondMoments(shape, self.rotation), Sensitivity(shape, self.rotation)
        self.kept: list[list[Tensor]] = [[] for _ in range(shape.layers)]

        def weigh() -> Tensor:
            return errors_weight(moments, sensitivity, output)

        storage = StorageCodes(shape, 0, model.dtype, self.rotation, weigh) if profile else None

        def first(sample: LayerSample) -> None:
            moments.observe(sample)
            if storage is not None:
                storage.observe(sample)
            _, values, keys = vectors(sample, self.rotation)
            both = torch.stack([tokens_of(x, coded(sample)) for x in (keys, values)])[:, :, ::EVERY]
            self.kept[sample.layer].append(both.transpose(1, 2).flatten(2))

        self._over(model, ids, first)
        mask, index = torch.ones_like(ids, dtype=torch.bool), torch.arange(ids.numel()).view_as(ids)
        some = slice(0, differentiated)
        refused = stream_gradients(model, ids[some], mask[some], index[some], 0, sensitivity.observe)
        assert not refused, refused
        output, _ = output_weights(model, shape)
        self.weights = weigh()[[2, 1]].transpose(0, 1)
        components = Components(shape, self.rotation, lambda: bases(moments, sensitivity, output))
        self._over(model, ids[some], components.observe)
        self.artifact = Artifact(
            {**components.tensors(), **(storage.tensors() if storage else {})}, fingerprint(model), {}
        )
        self.tokens = torch.stack([torch.cat(parts, 1) for parts in self.kept])
        del self.kept

    @staticmethod
    def _over(model: PreTrainedModel, ids: Tensor, sink: Callable[[LayerSample], None]) -> None:
        index = torch.arange(ids.numel()).view_as(ids)
        for part, numbers in zip(ids.split(BATCH), index.split(BATCH), strict=True):
            stream(model, part, torch.ones_like(part, dtype=torch.bool), numbers, sink)


class Asked:
    """One kind of text: its prefixes' keys and values, and the model's predictions after them.

    Attributes:
        chunks: `[rows, 2, layers, PREFIX, width]`, keys after RoPE.
        said: log-probabilities `[rows, QUESTION, vocabulary]` after the uncompressed prefix.
    """

    def __init__(self, model: PreTrainedModel, ids: Tensor, rotation: Rotation) -> None:
        prefix, self.question = ids[:, :PREFIX], ids[:, PREFIX:]
        layers = model(prefix, use_cache=True, logits_to_keep=1).past_key_values.layers
        both = [torch.stack([getattr(layer, name) for layer in layers], 1) for name in ("keys", "values")]
        self.model, self.heads = model, both[0].shape[2]
        self.turn = rotation.along(0, PREFIX, ids.device)
        self.chunks = torch.stack(both, 1).transpose(3, 4).flatten(4)
        self.said = self._predictions(self.chunks)

    def _predictions(self, chunks: Tensor) -> Tensor:
        cache = DynamicCache(config=self.model.config)
        for layer, both in enumerate(chunks.unflatten(-1, (self.heads, -1)).transpose(3, 4).unbind(2)):
            cache.update(both[:, 0].contiguous(), both[:, 1].contiguous(), layer)
        return self.model(self.question, past_key_values=cache).logits.float().log_softmax(-1)

    def compared(self, chunks: Tensor) -> tuple[float, float]:
        """Returns the KL, and the share of equal most likely tokens, with `chunks` instead of the uncompressed prefixes."""
        found = self._behind(chunks)
        same = (found.argmax(-1) == self.said.argmax(-1)).float().mean()
        return float((self.said.exp() * (self.said - found)).sum(-1).mean()), float(same)

    def answered(self, chunks: Tensor, tokens: int) -> bool:
        """Returns whether each of the only row's last `tokens` is the most likely token, with `chunks` as the prefix."""
        return torch.equal(self._behind(chunks)[0, -tokens - 1 : -1].argmax(-1), self.question[0, -tokens:])

    def _behind(self, chunks: Tensor) -> Tensor:
        """Returns the predictions with `chunks` as the prefixes, except for their first tokens, which are exact."""
        return self._predictions(torch.cat([self.chunks[:, :, :, :SINKS], chunks[:, :, :, SINKS:]], 3))

    def rotated(self, chunks: Tensor, sign: int) -> Tensor:
        """Returns the chunks with keys rotated (sign 1) or unrotated (-1) by RoPE."""
        cos, sin = self.turn
        keys = chunks[:, 0].unflatten(-1, (self.heads, -1)).transpose(2, 3)  # [rows, layers, heads, tokens, D]
        keys = Rotation.rotated(keys, cos, sign * sin).transpose(2, 3).flatten(3)
        return torch.stack([keys, chunks[:, 1]], 1)

    def by_codec(self, codec: Codec) -> tuple[Tensor, float]:
        """Returns the chunks decoded by `codec`, and the bytes per token without header and exact tokens."""
        blobs = [codec.encode(chunk, 0) for chunk in self.chunks]
        apart = codec.size(PREFIX, 0, self.chunks.dtype) - PREFIX * codec.bytes_per_token
        found = torch.stack([codec.decode(blob) for blob in blobs])
        return found, sum(len(blob) - apart for blob in blobs) / PREFIX / len(blobs)

    def by_codes(self, codes: Codes) -> tuple[Tensor, float]:
        """Returns the chunks decoded by `codes`, and the bytes per token."""
        plain = self.rotated(self.chunks, -1).permute(2, 1, 0, 3, 4)  # [layers, 2, rows, tokens, width]
        found = codes.decoded(plain.flatten(2, 3)).unflatten(2, plain.shape[2:4])
        return self.rotated(found.permute(2, 1, 0, 3, 4), 1), codes.bytes_per_token


def of_form(form: Form, fit: Fit, bits: list[float], once: float | None = None) -> Iterator[tuple[float, Codes]]:
    """Yields the codes for each budget, fitted at the price of a bit for it, or for the budget `once`.

    The price is computed from the fit before, and the widths once more from the new fit.
    """
    codes = Codes.fitted(form, fit.tokens, fit.weights, 0.0)
    if once is not None:
        codes = Codes.fitted(form, fit.tokens, fit.weights, codes.price(once))
    for budget in sorted(bits, reverse=True):
        if once is None:
            codes = Codes.fitted(form, fit.tokens, fit.weights, codes.price(budget))
        yield budget, codes.at(codes.price(budget))


def share(rows: list[dict], form: str, text: str) -> dict[str, float]:
    """Returns by `Codec`'s budgets the bytes of the form over `Codec`'s at equal KL; only if the form's KLs include `Codec`'s."""
    own = sorted((row["kl"][text], row["bytes_per_token"][text]) for row in rows if row["form"] == form)
    found = {}
    for row in rows:
        if row["form"] != "Codec" or not own[0][0] <= row["kl"][text] <= own[-1][0]:
            continue
        right = max(1, next(number for number, (kl, _) in enumerate(own) if kl >= row["kl"][text]))
        (k0, b0), (k1, b1) = own[right - 1], own[right]
        at = math.log(row["kl"][text] / k0) / math.log(k1 / k0)
        found[f"{row['bits']:g}"] = b0 * (b1 / b0) ** at / row["bytes_per_token"][text]
    return found


@torch.no_grad()
def main() -> None:
    """Fits, measures and prints; with --write saves the run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--fit", type=Path, required=True)
    parser.add_argument("--text", nargs="+", required=True, metavar="NAME=FILE")
    parser.add_argument("--bits", type=float, nargs="+", default=[3, 2, 1.5, 1, 0.5])
    parser.add_argument("--sequences", type=int, default=32, help="of the fit")
    parser.add_argument("--differentiated", type=int, default=16, help="of these, as in `calib fit`")
    parser.add_argument("--rows", type=int, default=4, help="of each text")
    parser.add_argument("--forms", action="store_true", help="what the profile is made of, step by step")
    parser.add_argument(
        "--write",
        action="store_true",
        help=f"keep the run in benchmarks/results: {RESULT}.MODEL.json, {FORMS_RESULT}.MODEL.json",
    )
    asked = parser.parse_args()
    torch.set_num_threads(1)
    model, tokenizer = load(asked.model), AutoTokenizer.from_pretrained(asked.model)
    began = time.perf_counter()

    def tell(row: object) -> None:
        print(f"{time.perf_counter() - began:5.0f} s", row, flush=True)

    fit = Fit(model, sequences(tokenizer, asked.fit, LENGTH, asked.sequences), asked.differentiated, not asked.forms)
    tell(f"fitted on {fit.tokens.shape[2]} tokens")
    texts = {}
    for text in asked.text:
        name, path = text.split("=", 1)
        ids = sequences(tokenizer, Path(path), PREFIX + QUESTION, asked.rows)
        texts[name] = Asked(model, ids, fit.rotation)
    first = Path(asked.text[0].split("=", 1)[1])
    numbers = [(Asked(model, ids, fit.rotation), tokens) for ids, tokens in hidden(tokenizer, first)]
    exact = sum(text.answered(text.chunks, tokens) for text, tokens in numbers) / HIDDEN
    tell(f"answers behind uncompressed prefixes: {exact}")
    rows = list[dict]()

    def measured(form: str, budget: float, back: Callable[[Asked], tuple[Tensor, float]]) -> None:
        row = {"form": form, "bits": budget, **{name: dict[str, float]() for name in ("bytes_per_token", "kl", "same")}}
        for name, text in texts.items():
            chunks, row["bytes_per_token"][name] = back(text)
            row["kl"][name], row["same"][name] = text.compared(chunks)
        row["answers"] = sum(text.answered(back(text)[0], tokens) for text, tokens in numbers) / HIDDEN
        rows.append(row)
        tell(row)

    profiles = dict(list(PROFILES.items())[: 1 if asked.forms else None])
    for name, options in profiles.items():
        for budget in asked.bits:
            codec = Codec.from_artifact(fit.artifact, budget, sinks=SINKS, rotation=fit.rotation, **options)
            assert codec.sized and codec.predicts
            measured(name, budget, lambda text, codec=codec: text.by_codec(codec))
    shares = {name: {text: share(rows, name, text) for text in texts} for name in list(profiles)[1:]}
    tell(shares)
    forms = [(form.name, form, None) for form in FORMS] + [(f"{FORMS[-1].name}, one fit", FORMS[-1], ONCE)]
    for name, form, once in forms if asked.forms else ():
        for budget, codes in of_form(form, fit, asked.bits, once):
            measured(name, budget, lambda text, codes=codes: text.by_codes(codes))
        shares[name] = {text: share(rows, name, text) for text in texts}
        tell({name: shares[name]})
    if asked.write:
        name = f"{FORMS_RESULT if asked.forms else RESULT}.{Path(asked.model).name}.json"
        values = 2 * fit.tokens.shape[0] * fit.tokens.shape[3]  # of a token
        keep(
            name,
            {
                **sizes_of(asked),
                "values": values,
                "exact_answers": exact,
                "rows": rows,
                "bytes over Codec's at equal KL": shares,
            },
        )


def sizes_of(asked: argparse.Namespace) -> dict[str, object]:
    """Returns the run's arguments for its file."""
    names = [text.split("=", 1)[0] + "=" + Path(text).name for text in asked.text]
    sizes = {"sequences": asked.sequences, "differentiated": asked.differentiated, "rows_of_a_text": asked.rows}
    return {
        "model": Path(asked.model).name,
        "fit": asked.fit.name,
        "text": names,
        "prefix": PREFIX,
        "question": QUESTION,
        **sizes,
    }


if __name__ == "__main__":
    main()
