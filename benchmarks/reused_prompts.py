"""Prompts that fresh vLLM engines are asked, and what is counted of their answers: for `lmcache_reuse.py` and `vllm_reuse.py`.

Prompts are keyed lines of the embedded model's unseen split, of a hundred lines and a question: a number is looked up, and is right
or wrong.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

from transformers import AutoTokenizer

from calib.documents.generators import retrieval_cases

ROOT = Path(__file__).parents[1]
MODEL = ROOT / "artifacts/tiny-llama"
LINES = 100  # of a prompt: 907 tokens
ANSWER = 600  # seconds that an engine may take


class Prompts:
    """So many prompts, in a folder where engines find them and leave their logs and answers."""

    def __init__(self, count: int, folder: Path) -> None:
        self.folder = folder
        self._tokenizer = AutoTokenizer.from_pretrained(MODEL)
        self._cases = retrieval_cases(1, count, LINES)
        self.ids = [self._tokenizer(case.prompt).input_ids for case in self._cases]
        (folder / "prompts.json").write_text(json.dumps(self.ids))
        self._first: list[str] | None = None

    def ask(self, name: str, transfer: dict, **arguments: int) -> list[dict]:
        """The answers of a fresh engine with this `--kv-transfer-config`, and other arguments of vLLM's."""
        answers = self.folder / f"{name}.json"
        given = json.dumps({"kv_transfer_config": transfer, **arguments})
        command = [sys.executable, ROOT / "benchmarks/vllm_engine.py", MODEL, given]
        environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", **os.environ}
        if "tensor_parallel_size" in arguments:  # vLLM would bind each rank to a NUMA node of its own
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

    def row(self, name: str, answers: list[dict], wanted: int) -> dict:
        """What is counted of a run's answers. The first run that is counted is the one that others are compared with.

        SystemExit where another number of a prompt's tokens came from a cache than `wanted`.
        """
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
