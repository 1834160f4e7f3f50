"""A folder in which documented commands find the files that they name: toy models, texts, artifacts and runs under these names.

The kind of a file follows from the option that names it, so the placeholders of the documents need no list here.
"""

import json
import random
import shutil
from collections.abc import Callable
from contextlib import chdir
from pathlib import Path

import torch
import yaml
from documented import ROOT, Command
from models import baichuan2
from tiny_gguf import save_gguf
from toy_bench_run import made_up
from toy_run import toy_run
from transformers import AutoModelForCausalLM, LlamaConfig

from calib.cli import main
from calib.config_files import find_config
from calib.documents.words import WORDS
from calib.errors import UsageError

EMBEDDED = "artifacts/tiny-llama"  # the default of several commands
# Heads and vocabulary of the embedded model, for which the shipped configurations are made; two small layers.
SHAPE = {
    "vocab_size": 2048,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
SMALL_FIT = {
    "data.length": 128,
    "data.sequences": 4,
    "data.heldout_sequences": 1,
    "data.batch_size": 4,
    "model.dictionary.samples": 512,
    "model.dictionary.heldout_samples": 64,
    "model.dictionary.epochs": 1,
    "model.clip_factors": [1, 0.8],
    "model.query_rows": 8,
    "trainer.accelerator": "cpu",
    "trainer.devices": 1,
    "trainer.logger": False,
    "trainer.enable_progress_bar": False,
}
SMALL_EVAL = {
    "model": EMBEDDED,
    "methods": [{"name": name, "method": name} for name in ("full", "kivi", "rtn")],
    "tasks": [{"task": "retrieval", "lines": [3], "cases": 2}],
}
SMALL_BENCH = {"model": EMBEDDED, "methods": ["full", "kivi"], "contexts": [64]}
MODELS = ("--model", "--model.path", "--init_from")
TEXTS = ("--text", "--trigram", "--data.text", "--data.train.text", "--data.validation.text", "--prompt-file")
MEASURED = (
    "benchmarks.embedded_model.scores",
    "benchmarks.key_profile.page",
)  # modules whose first argument is a model


def as_words(options: dict[str, object]) -> list[str]:
    """The options as the words of a command line."""
    return [word for name, value in options.items() for word in (f"--{name}", json.dumps(value).strip('"'))]


class Sandbox:
    """A toy model, text and artifact below `root`, and a folder for each document, with copies of them under its names."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.model, self.text, self.artifact = root / "model", root / "text", root / "fitted.calib.safetensors"
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE)).half().save_pretrained(self.model)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(ROOT / EMBEDDED / name, self.model)
        self.text.write_text(prose(), encoding="utf-8")
        words = ["fit", "--config", "tiny.yaml", "--model.path", self.model, "--output", self.artifact]
        words += [
            "--model.rotations",
            "true",
            "--model.nuq",
            "[0.01]",
        ]  # for methods whose tensors are not in a default fit
        assert main([*map(str, words), "--trainer.default_root_dir", str(root / "fit"), *as_words(SMALL_FIT)]) == 0

    def folder(self, document: str) -> Path:
        """The folder for a document's commands, with the embedded model, its artifact and the data set that configurations name."""
        folder = self.root / document.replace("/", "-")
        if not folder.exists():
            folder.mkdir()
            self.put(folder / EMBEDDED, self.new_model)
            self.put(folder / f"{EMBEDDED}.calib.safetensors", self.new_artifact)
            self.put(folder / "Salesforce/wikitext", self.new_data_set)
        return folder

    def put(self, path: Path, make: Callable[[Path], object]) -> None:
        """Call `make(path)` if `path` does not exist."""
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            make(path)

    def new_model(self, path: Path) -> None:
        if path.suffix == ".gguf":
            save_gguf(path)
        else:
            shutil.copytree(self.model, path)

    def new_artifact(self, path: Path) -> None:
        shutil.copy(self.artifact, path)

    def new_text(self, path: Path) -> None:
        shutil.copy(self.text, path)

    def new_data_set(self, path: Path) -> None:
        """WikiText's splits, as a local data set of the same name."""
        splits = ("train", "validation", "test")
        files = [{"split": split, "path": f"{split}.txt"} for split in splits]
        path.mkdir()
        front = yaml.safe_dump({"configs": [{"config_name": "wikitext-2-raw-v1", "data_files": files}]})
        (path / "README.md").write_text(f"---\n{front}---\n", encoding="utf-8")
        for split in splits:
            self.new_text(path / f"{split}.txt")

    def provide(self, command: Command, folder: Path) -> None:
        """Put every file that the command reads into the folder, unless an earlier command has written it."""
        for name in command.values("--config"):
            self.put_config(name, command.words[1], folder)
        for name in [*command.values(*MODELS), *named_models(command)]:
            self.put(folder / name, self.new_model)
        for value in command.values(*TEXTS):
            given = yaml.safe_load(value)
            for name in given if isinstance(given, list) else [given]:
                self.put(folder / str(name), self.new_text)
        for name in [*command.values("--artifact"), *(first(command) if "inspect" in command.words[:2] else ())]:
            self.put(folder / name, self.new_artifact)
        for name in command.values("--compare"):
            self.put(folder / name, lambda path: path.write_text(json.dumps(toy_run())))
        for name in command.values("--bench"):
            self.put(folder / name, lambda path: path.write_text(json.dumps(made_up())))
        if "merge" in command.words[:2]:
            self.put_shards(command, folder)
        if "convert" in command.words[:2]:
            self.put(folder / command.words[3], {"baichuan2": baichuan2.save, "gguf": save_gguf}[command.words[2]])

    def put_shards(self, command: Command, folder: Path) -> None:
        """Fit the shards that the command merges, with the command's own options."""
        end = next(position for position, word in enumerate(command.words) if word.startswith("--"))
        files, options = command.words[2:end], command.words[end:]
        for number, name in enumerate(files, 1):
            words = ["fit", *options, *as_words(SMALL_FIT), "--shard", f"{number}/{len(files)}", "--output", name]
            with chdir(folder):
                self.put(Path(name), lambda _, words=words: main(words))

    def put_config(self, name: str, command: str, folder: Path) -> None:
        """Write the configuration, if neither the package nor the folder has it, and the model and artifact that it names.

        It is a copy of the repository's configuration of the same name, or else a small one.
        """
        file = folder / name
        try:
            with chdir(folder):
                file = folder / find_config(name)
        except UsageError:
            shipped = [ROOT / name, *(ROOT / other / file.name for other in ("configs/eval", "benchmarks/peers"))]
            same = next((path for path in shipped if path.is_file()), None)
            small = SMALL_BENCH if command == "bench" else SMALL_EVAL
            self.put(file, lambda path: path.write_text(same.read_text() if same else yaml.safe_dump(small)))
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
        model = content.get("model")
        model = model.get("path") if isinstance(model, dict) else model
        if model:
            self.put(folder / model, self.new_model)
        if content.get("artifact"):
            self.put(folder / content["artifact"], self.new_artifact)


def first(command: Command) -> list[str]:
    """The first argument of a `calib` command, as a list; empty if it is an option."""
    return [word for word in command.words[2:3] if not word.startswith("--")]


def named_models(command: Command) -> list[str]:
    """Models that the modules in MEASURED take as their first argument."""
    position = next((command.words.index(name) for name in MEASURED if name in command.words), None)
    return [] if position is None else [command.words[position + 1]]


def prose(lines: int = 700) -> str:
    """Seeded random sentences of about 60 bytes each."""
    draw = random.Random(0)
    return "".join(f"{' '.join(draw.choices(WORDS, k=10)).capitalize()}.\n" for _ in range(lines))
