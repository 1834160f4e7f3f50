"""Tasks of lm-eval with local data, one of each output type, and lm-eval's own `HFLM` to compare with."""

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import yaml

WORDS = ["kalo", "mine", "rutaso", "pe", "kamiru", "nelo", "tasope", "rulomi", "kape", "soneta", "miru", "loka"]
CHOICE, ANSWER, TEXT = "toy_choice", "toy_answer", "toy_text"


def save_tasks(folder: Path, cases: int = 6, **changes: object) -> Path:
    """Write three tasks and their data into `folder` and return it; `changes` go into the configuration of each task."""
    folder.mkdir(exist_ok=True)
    docs = [
        {
            "question": " ".join(WORDS[case % 5 : case % 5 + 2 + case]) + " is",
            "choices": [WORDS[case], f"{WORDS[case + 1]} {WORDS[case]}", "x"],
            "gold": case % 3,
            "text": " ".join(WORDS * (1 + case))[: 90 * (1 + case)],
        }
        for case in range(cases)
    ]
    data = folder / "docs.json"
    data.write_text("\n".join(map(json.dumps, docs)), encoding="utf-8")
    shared = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}, "cache_dir": str(folder / "cache")},
        "test_split": "test",
        "fewshot_split": "test",
        "metadata": {"version": 3.0},
    }
    own = {
        CHOICE: {
            "output_type": "multiple_choice",
            "doc_to_text": "{{question}}",
            "doc_to_choice": "{{choices}}",
            "doc_to_target": "{{gold}}",
            "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
        },
        ANSWER: {
            "output_type": "generate_until",
            "doc_to_text": "{{question}}",
            "doc_to_target": "{{choices[0]}}",
            "generation_kwargs": {"until": ["\n", "."], "max_gen_toks": 9, "do_sample": False},
            "metric_list": [{"metric": "exact_match"}],
        },
        TEXT: {
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "{{text}}",
            "metric_list": [{"metric": name} for name in ("word_perplexity", "byte_perplexity", "bits_per_byte")],
        },
    }
    for name, config in own.items():
        content = {"task": name, **shared, **config, **changes}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")
    return folder


def plain_lm(model, tokenizer, batch_size: int = 4):
    """lm-eval's `HFLM` over the model. It imports accelerate, which it needs only to load and distribute models: if accelerate is
    not installed, an empty module replaces it during the import."""
    missing = [] if find_spec("accelerate") else ["accelerate", "accelerate.utils"]
    for name in missing:
        sys.modules[name] = module = ModuleType(name)
        for attribute in ("Accelerator", "InitProcessGroupKwargs", "find_executable_batch_size", "get_max_memory"):
            setattr(module, attribute, None)
    try:
        from lm_eval.models.huggingface import HFLM
    finally:
        for name in missing:
            del sys.modules[name]
    return HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size)


def requests(kind: str, *arguments: tuple):
    """lm-eval's requests of one kind."""
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, each, position, ("toy", position, 1)) for position, each in enumerate(arguments)]
