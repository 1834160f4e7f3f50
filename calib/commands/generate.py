"""`calib generate`: one prompt through a method and through the full cache, with what each cache weighs."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from calib.arguments import Parser
from calib.artifact_name import artifact_file
from calib.errors import UsageError
from calib.method_options import as_usage, read_method, read_options


def run(argv: Sequence[str]) -> int:
    """Generates twice and prints both continuations and both memories."""
    from calib.runtime.methods import METHODS, build, options_of

    parser = Parser(
        prog="calib generate",
        description="Run a prompt through a method beside the full cache, and show both memories.",
        epilog="A method's own options follow as flags (--bits 2 --group 32); `calib methods NAME` tells them.",
        allow_abbrev=False,
    )
    parser.add_argument("--model", default="artifacts/tiny-llama", help="folder or hub name of a causal language model")
    parser.add_argument(
        "--dtype", default="auto", help="float32, bfloat16, float16, or auto: what the weights are stored in"
    )
    parser.add_argument("--artifact", help="what `calib fit` wrote for this model, a file or a name on the hub")
    parser.add_argument(
        "--method",
        default="kivi",
        help=f"one of {', '.join(METHODS)}, or a YAML file that holds `method:` and its options",
    )
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", help="the text to continue")
    prompt.add_argument("--prompt-file", type=Path, help="a UTF-8 file that holds it")
    parser.add_argument("--max-new-tokens", type=int, default=24)
    parser.add_argument(
        "--sample", action="store_true", help="sample at temperature 1 instead of taking the likeliest token"
    )
    parser.add_argument("--seed", type=int, default=0)
    asked, rest = parser.parse_known_args(argv)
    name, options = read_method(asked.method)
    with as_usage():
        known = set(options_of(name))
        options |= read_options(rest, known, name)
        build(name, options)
    if asked.max_new_tokens < 1:
        raise UsageError(f"--max-new-tokens must be at least 1, got {asked.max_new_tokens}")
    if asked.artifact:
        asked.artifact = artifact_file(asked.artifact)
    text = read_prompt(asked)
    return generate(asked, name, options, text)


def read_prompt(asked: argparse.Namespace) -> str:
    """The prompt as given, from its file, or a generated list of lines to remember."""
    if asked.prompt is not None:
        return str(asked.prompt)
    if asked.prompt_file is not None:
        try:
            return asked.prompt_file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"cannot read the prompt file '{asked.prompt_file}': {error}") from error
    from calib.testbed.generators import retrieval_cases

    (case,) = retrieval_cases(asked.seed, count=1, lines=40)
    print(f"no prompt given: 40 lines to remember and a question whose answer is {case.answer}")
    return case.prompt


def generate(asked: argparse.Namespace, name: str, options: dict[str, Any], text: str) -> int:
    """Loads the model, generates with the full cache and with the method, prints both."""
    import torch
    from transformers import DynamicCache

    from calib.capture.language_model import load
    from calib.runtime import Artifact, compress
    from calib.runtime.memory import measure

    artifact = Artifact.load(asked.artifact) if asked.artifact else None
    model, tokenizer = load(asked.model, asked.dtype)
    inputs = tokenizer(text, return_tensors="pt", return_token_type_ids=False).to(model.device)
    length = inputs["input_ids"].shape[1]
    if not text or not length:
        raise UsageError("the prompt is empty: give --prompt some text")
    settings = {
        "max_new_tokens": asked.max_new_tokens,
        "do_sample": asked.sample,
        **({"top_k": 0} if asked.sample else {}),
    }

    def continuation(cache: Any) -> "torch.Tensor":
        torch.manual_seed(asked.seed)
        return model.generate(**inputs, **settings, past_key_values=cache)[0, length:]

    with as_usage():
        cache = compress(model, name, artifact, seed=asked.seed, **options)
    with cache:
        found = continuation(cache)
    full = DynamicCache(config=model.config)
    expected = continuation(full)

    shorter = min(len(expected), len(found))
    same = int((expected[:shorter] == found[:shorter]).long().cumprod(0).sum())
    label = " ".join([name, *(f"{option}={value}" for option, value in options.items())])
    memory = cache.memory()
    print(f"prompt: {length} tokens, ends {text[-40:]!r}")
    for title, size, tokens in (("full cache", measure(full), expected), (label, memory.measured_bytes, found)):
        print(f"{title}: {size:,} bytes\n    {tokenizer.decode(tokens)!r}")
    print(f"the first {same} of {len(expected)} tokens agree\nmemory: {memory}")
    return 0
