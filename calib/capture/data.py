"""The LightningDataModule that loads model and corpus and gives batches whose layer samples can be streamed."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from lightning.pytorch import LightningDataModule
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from calib.capture.batches import CapturedBatch, TokenBatch, TokenBatches
from calib.capture.corpus import Corpus, divide, text_files, text_sequences, token_hash
from calib.capture.device_map import DeviceMap, MaxMemory, check_device_map, check_one_process, check_token_ids
from calib.capture.generated import first_token, generated_sequences, sampled_text, spread
from calib.capture.language_model import check_dtype, load, without_waiting_for_the_hub
from calib.capture.shard import WHOLE
from calib.documents.corpus import TextSource, text_hash
from calib.errors import UsageError
from calib.runtime.messages.printable import printable

GENERATED = "generated"


class CaptureData(LightningDataModule):
    """Runs a causal language model over a corpus and streams queries, keys and values layer by layer.

    Args:
        model_path: the model, a local folder or a hub name.
        model_dtype: the dtype the model runs in.
        model_device_map: how accelerate spreads the model over devices; None puts it on the Trainer's device.
        model_max_memory: memory that the device map may use of each device.
        seed: chooses the parts of the text and the sampled tokens.
        text: local text files or folders (UTF-8); when given, `name` is ignored.
        name: data set on the Hugging Face hub, or `generated`: made on the spot, half retrieval documents, half text
            sampled from the model.
        config: the data set's configuration.
        split: the split that is measured.
        heldout_split: the split on which errors are reported; None: sequences of `split` that are not measured.
        column: the column that holds the text.
        sampled: share of the measured sequences, from 0 to below 1, that are sampled from the model itself, spread among those
            of the text, so that bases also suit text of other kinds (of `generated`, half is sampled in any case).
        sampled_length: tokens of one sampled text, a divisor of `length`; a sampled sequence is then several texts, which takes
            fewer decoding steps with more rows. None: one text.
        natural_spacing: convert WikiText's tokenised spacing (` @-@ `, ` ,`) to written English.
        positions: sequences begin at different positions below this, so that keys are measured with the rotations there; None:
            all begin at 0, and statistics of rotated keys hold for caches up to `length`.
        length: tokens in a sequence; cut to the model's longest context.
        sequences: sequences on which statistics are measured.
        heldout_sequences: sequences held out for the reported errors.
        batch_size: sequences of one forward pass.
    """

    def __init__(
        self,
        model_path: str,
        model_dtype: str = "float32",
        model_device_map: DeviceMap | None = None,
        model_max_memory: MaxMemory | None = None,
        seed: int = 0,
        text: str | list[str] | None = None,
        name: str | None = GENERATED,
        config: str | None = None,
        split: str = "train",
        heldout_split: str | None = None,
        column: str = "text",
        sampled: float = 0.0,
        sampled_length: int | None = None,
        natural_spacing: bool = False,
        positions: int | None = None,
        length: int = 512,
        sequences: int = 32,
        heldout_sequences: int = 8,
        batch_size: int = 8,
    ) -> None:
        super().__init__()
        for option, value, least in (
            ("length", length, 32),
            ("sequences", sequences, 1),
            ("heldout_sequences", heldout_sequences, 1),
            ("batch_size", batch_size, 1),
            ("positions", positions, 32),
        ):
            if value is not None and value < least:
                raise UsageError(f"data.{option}={value}: must be at least {least}")
        if not text and not name:
            raise UsageError(
                "no corpus: give data.text=FILE, or data.name=OWNER/DATASET of the hub, or data.name=generated"
            )
        if not 0 <= sampled < 1 or (sampled and not text and name == GENERATED):
            raise UsageError(f"data.sampled={sampled}: from 0 to below 1, and 0 with data.name={GENERATED}")
        if sampled_length is not None and (sampled_length < 32 or length % sampled_length):
            raise UsageError(
                f"data.sampled_length={sampled_length}: at least 32, and a divisor of data.length={length}"
            )
        check_device_map(model_device_map, model_max_memory)
        self.model_path, self.model_dtype, self.seed = model_path, check_dtype(model_dtype), seed
        self.device_map, self.max_memory = model_device_map, model_max_memory
        self.source = TextSource(
            text_files([text] if isinstance(text, str) else list(text or [])),
            name,
            config,
            split,
            column,
            natural_spacing,
        )
        self.heldout_split, self.length, self.sampled = heldout_split, length, sampled
        self.positions, self.sampled_length = positions, sampled_length
        self.sequences, self.heldout_sequences, self.batch_size = sequences, heldout_sequences, batch_size
        self.shard = WHOLE  # the part of each stage's batches that this machine reads
        self.notes: list[str] = []
        self.tell: Callable[[str], None] = silent  # called with a line that names the step begun
        self.model: PreTrainedModel | None = None
        self.tokenizer: PreTrainedTokenizerBase | None = None
        self.corpus: Corpus | None = None
        self.read("train")

    def read(self, part: str, sequences: int | None = None, skip: int = 0) -> None:
        """Chooses what the next dataloader reads.

        Args:
            part: `train` or `heldout`.
            sequences: read only the first so many sequences; None for all.
            skip: leave out so many batches of this process, which were read before an interruption.
        """
        if part not in ("train", "heldout"):
            raise ValueError(f"part={printable(part)}: 'train' or 'heldout'")
        self.reading = (part, sequences, skip)

    @property
    def own_sequences(self) -> int:
        """Number of measured sequences sampled from the model (`sampled`); at least one sequence is left for the text."""
        return min(round(self.sampled * self.sequences), self.sequences - 1)

    def load(self) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, Corpus]:
        """Returns the model, its tokenizer and the corpus, loaded at the first call."""
        if self.model is None or self.tokenizer is None:
            check_one_process(self.device_map, self.trainer.world_size if self.trainer else 1)
            self.tell(f"loading the model {self.model_path}")
            self.model, self.tokenizer = load(self.model_path, self.model_dtype, self.device_map, self.max_memory)
            if self.device_map is None:
                self.model.to(self.trainer.strategy.root_device if self.trainer else "cpu")
        if self.corpus is None:
            self.corpus = self._make_corpus(self.model, self.tokenizer)
        return self.model, self.tokenizer, self.corpus

    def setup(self, stage: str) -> None:
        """Loads everything; Lightning calls it in every process."""
        self.load()

    def train_dataloader(self) -> TokenBatches:
        """Returns the batches chosen by `read`."""
        _, _, corpus = self.load()
        part, count, skip = self.reading
        sequences, first = (corpus.train, 0) if part == "train" else (corpus.heldout, len(corpus.train))
        rank, processes = (self.trainer.global_rank, self.trainer.world_size) if self.trainer else (0, 1)
        asked = (self.batch_size, skip, rank, processes, self.positions or 0, self.shard)
        return TokenBatches(sequences[:count], first, *asked)

    def on_after_batch_transfer(self, batch: TokenBatch, dataloader_idx: int) -> CapturedBatch:
        """Pairs the batch, now on the device, with the model."""
        model, _, _ = self.load()
        return CapturedBatch(model, batch)

    def _make_corpus(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Corpus:
        longest = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None) or self.length
        length = min(self.length, longest)
        if length < self.length:
            self.notes.append(f"data.length={self.length} is cut to {length}, the longest this model was made for")
        if self.positions is not None and self.positions > longest:
            self.notes.append(f"data.positions={self.positions} is cut to {longest}, all that this model was made for")
            self.positions = longest
        own, wanted_heldout = self.own_sequences, self.heldout_sequences
        wanted = self.sequences - own
        label, heldout_label = self.source.label, ""
        origin: dict[str, Any] = {"name": label}
        if not self.source.text and self.source.name == GENERATED:
            self.tell(f"generating {wanted + wanted_heldout} sequences of {length} tokens")
            sequences = generated_sequences(model, tokenizer, length, wanted + wanted_heldout, self.seed)
            origin = {"name": GENERATED}
        elif self.source.text or not self.heldout_split:
            self.tell(f"reading {label}")
            text = read(self.source)
            sequences = text_sequences(text, tokenizer, length, wanted + wanted_heldout, self.seed, label)
            origin["sha256"] = text_hash(text)
        else:
            self.tell(f"reading {label} and its split {self.heldout_split}")
            other = replace(self.source, split=self.heldout_split)
            text, heldout_text, heldout_label = read(self.source), read(other), other.label
            sequences = text_sequences(text, tokenizer, length, wanted, self.seed, label)
            heldout = text_sequences(heldout_text, tokenizer, length, wanted_heldout, self.seed, heldout_label)
            origin |= {"sha256": text_hash(text), "heldout": heldout_label, "heldout_sha256": text_hash(heldout_text)}
        if heldout_label:
            train = sequences
            for part, found, asked in ((label, train, wanted), (heldout_label, heldout, wanted_heldout)):
                if len(found) < asked:
                    self.notes.append(f"the corpus {part} fills {len(found)} of the {asked} sequences asked for")
        else:
            train, heldout, notes = divide(sequences, wanted, wanted_heldout, label)
            self.notes += notes
        if own:
            self.tell(f"sampling {own} sequences of {length} tokens from the model")
            stretch = self.sampled_length or length
            if length % stretch:  # `length` was cut to the model's longest context
                stretch = length
            texts = sampled_text(model, first_token(tokenizer), stretch, own * length // stretch, self.seed)
            train = spread(train, texts.reshape(own, length).cpu())
            origin |= {"sampled": own} | ({} if stretch == length else {"sampled_length": stretch})
        for part in (train, heldout):
            check_token_ids(model, part)
        if self.positions is not None:
            origin["positions"] = self.positions
        origin |= {
            "length": length,
            "sequences": len(train),
            "heldout_sequences": len(heldout),
            "tokens": train.numel(),
            "tokens_sha256": token_hash(train, heldout),
        }
        return Corpus(train, heldout, origin)


def silent(what: str) -> None:
    """Prints nothing: the default of `CaptureData.tell`."""


def read(source: TextSource) -> str:
    """Returns the source's text, without waiting for a hub that cannot be reached."""
    with without_waiting_for_the_hub():
        return source.read()
