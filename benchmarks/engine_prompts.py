"""Prompts for new vLLM engines, and the counts of their right answers: for `lmcache_reuse.py`, `vllm_reuse.py` and `vllm_fp8.py`.

A prompt is a hundred keyed lines of the split that the embedded model was not trained on, and a question; the answer is a number,
right or wrong.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from calib.documents.generators import retrieval_cases

ROOT = Path(__file__).parents[1]
MODEL = ROOT / "artifacts/tiny-llama"
LINES = 100  # lines of a prompt, which has 907 tokens
ANSWER = 600  # seconds that an engine may take for all answers


class Prompts:
    """`count` prompts, written to a folder, from which engines read them and into which they write logs and answers."""

    def __init__(self, count: int, folder: Path) -> None:
        self.folder = folder
        self._tokenizer = AutoTokenizer.from_pretrained(MODEL)
        self._cases = retrieval_cases(1, count, LINES)
        self.ids = [self._tokenizer(case.prompt).input_ids for case in self._cases]
        (folder / "prompts.json").write_text(json.dumps(self.ids))
        self._first: list[str] | None = None

    def ask(self, name: str, model: Path = MODEL, **arguments: Any) -> dict:
        """Returns the answers of a new engine with these arguments of vLLM, and its scales, as `vllm_engine.py` writes them."""
        answers = self.folder / f"{name}.json"
        command: list[str | Path] = [sys.executable, ROOT / "benchmarks/vllm_engine.py", model, json.dumps(arguments)]
        environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", **os.environ}
        if "tensor_parallel_size" in arguments:  # otherwise vLLM binds each rank to a separate NUMA node
            environment["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        with open(self.folder / f"{name}.engine.log", "w") as log:
            subprocess.run(
                [*command, self.folder / "prompts.json", answers],
                stdout=log,
                stderr=log,
                env=environment,
                timeout=ANSWER,
                check=True,
            )
        return json.loads(answers.read_text())

    def row(self, name: str, found: dict, wanted: int) -> dict:
        """Returns the counts of the answers that `ask` found; `same_answers` compares them with those of the first run counted.

        Raises SystemExit if the number of a prompt's tokens that came from a cache is not `wanted`.
        """
        answers = found["answers"]
        cached = sorted({answer["cached"] for answer in answers})
        if cached != [wanted]:
            raise SystemExit(
                f"{name}: {cached} tokens of a prompt came from a cache, expected {wanted}; see {self.folder}"
            )
        said = [self._tokenizer.decode(answer["ids"]) for answer in answers]
        self._first = said if self._first is None else self._first
        return {
            "run": name,
            "reused_tokens": wanted,
            "right": sum(
                text.strip().startswith(case.answer.strip()) for text, case in zip(said, self._cases, strict=True)
            ),
            "of": len(said),
            "same_answers": sum(text == other for text, other in zip(said, self._first, strict=True)),
        }
