"""`calib generate`: runs one prompt with a method's cache and with transformers' `DynamicCache`, and shows both memories."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from calib.arguments import Parser
from calib.artifact_name import artifact_file, load_artifact
from calib.errors import UsageError
from calib.method_options import as_usage, read_method, read_options

NEW_TOKENS = 24


def run(argv: Sequence[str]) -> int:
    """Generates twice and prints both continuations and both memories."""
    from calib.runtime.methods import METHODS, build, options_of

    parser = Parser(
        prog="calib generate",
        description="Run a prompt through a method and through transformers' DynamicCache, and show both memories. The prompt is "
        "continued as it is: no chat template is applied.",
        epilog="A method's own options follow as flags (--bits 2 --group 32); `calib methods NAME` lists them.",
        allow_abbrev=False,
    )
    parser.add_argument("--model", default="artifacts/tiny-llama", help="folder or hub name of a causal language model")
    parser.add_argument(
        "--dtype", default="auto", help="float32, bfloat16, float16, or auto: what the weights are stored in"
    )
    parser.add_argument("--device", default="cpu", help="such as cpu or cuda")
    parser.add_argument("--artifact", help="what `calib fit` wrote for this model, a file or a name on the hub")
    parser.add_argument(
        "--method",
        default="kivi",
        help=f"one of {', '.join(METHODS)}, or a YAML file that holds `method:` and its options",
    )
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument(
        "--prompt", help="the text to continue (default: lines to remember, and a question about one of them)"
    )
    prompt.add_argument("--prompt-file", type=Path, help="a UTF-8 file that holds it, - for stdin")
    parser.add_argument(
        "--max-new-tokens",
        type=int,
        help=f"tokens to generate (default: {NEW_TOKENS}; without a prompt as many as the answer has)",
    )
    parser.add_argument(
        "--sample", action="store_true", help="sample at temperature 1 instead of taking the likeliest token"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of sampling, of the default prompt, and of methods that use random numbers"
    )
    asked, rest = parser.parse_known_args(argv)
    name, options = read_method(asked.method)
    with as_usage():
        known = set(options_of(name))
        options |= read_options(rest, known, name)
        build(name, options)
    if asked.max_new_tokens is not None and asked.max_new_tokens < 1:
        raise UsageError(f"--max-new-tokens must be at least 1, got {asked.max_new_tokens}")
    if asked.artifact:
        asked.artifact = artifact_file(asked.artifact)
    text, answer = read_prompt(asked)
    return generate(asked, name, options, text, answer)


def read_prompt(asked: argparse.Namespace) -> tuple[str, str | None]:
    """Returns the prompt, given as text, in a file, on stdin, or generated (lines to remember), and the answer of a generated one.

    The answer is None otherwise. Raises UsageError for text that is not UTF-8, or a file that cannot be read.
    """
    if asked.prompt is not None:
        try:
            asked.prompt.encode()
        except UnicodeEncodeError as error:  # bytes of the command line that are not UTF-8
            from calib.runtime.messages.printable import printable  # imports torch

            raise UsageError(
                f"--prompt {printable(asked.prompt)}: character {error.start} is not UTF-8; give UTF-8 text, "
                "or a file of it as --prompt-file"
            ) from error
        return str(asked.prompt), None
    if asked.prompt_file is not None:
        try:
            if str(asked.prompt_file) == "-":
                return sys.stdin.buffer.read().decode(), None
            return asked.prompt_file.read_text(encoding="utf-8"), None
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"cannot read the prompt file '{asked.prompt_file}': {error}") from error
    from calib.documents.generators import retrieval_cases

    (case,) = retrieval_cases(asked.seed, count=1, lines=40)
    print(f"no prompt given: 40 lines to remember and a question whose answer is {case.answer}")
    return case.prompt, case.answer


def generate(asked: argparse.Namespace, name: str, options: dict[str, Any], text: str, answer: str | None) -> int:
    """Loads the model, generates with `DynamicCache` and with the method, prints both, and whether they give `answer`."""
    import torch
    from transformers import DynamicCache

    from calib.capture.language_model import load
    from calib.evaluate.loaded import usable_device
    from calib.runtime import cache_argument, compress
    from calib.runtime.memory import measure

    device = usable_device(asked.device)
    artifact = load_artifact(asked.artifact) if asked.artifact else None
    model, tokenizer = load(asked.model, asked.dtype)
    model.to(device)
    inputs = tokenizer(text, return_tensors="pt", return_token_type_ids=False).to(model.device)
    length = inputs["input_ids"].shape[1]
    if not text or not length:
        raise UsageError("the prompt is empty: give --prompt some text")
    settings = {
        "max_new_tokens": asked.max_new_tokens
        or (NEW_TOKENS if answer is None else len(tokenizer(answer, add_special_tokens=False)["input_ids"])),
        "do_sample": asked.sample,
        **({"top_k": 0} if asked.sample else {}),
    }

    def continuation(cache: Any) -> "torch.Tensor":
        torch.manual_seed(asked.seed)
        return model.generate(**inputs, **settings, **{cache_argument.NAME: cache})[0, length:]

    with as_usage():
        cache = compress(model, name, artifact, seed=asked.seed, tokenizer=tokenizer, **options)
    with cache:
        found = continuation(cache)
    full = DynamicCache(config=model.config)
    expected = continuation(full)

    label = " ".join([name, *(f"{option}={value}" for option, value in options.items())])
    memory = cache.memory()
    print(f"prompt: {length} tokens, ends {text[-40:]!r}")
    texts = [tokenizer.decode(tokens) for tokens in (expected, found)]
    titles, sizes = ("DynamicCache", label), (measure(full), memory.measured_bytes)
    for title, size, told in zip(titles, sizes, texts, strict=True):
        print(f"{title}: {size:,} bytes\n    {told!r}")
    print(agreement(expected.tolist(), found.tolist()))
    if answer is not None:
        right = ["right" if told.strip().startswith(answer) else "wrong" for told in texts]
        print(f"the answer {answer}: {right[0]} with DynamicCache, {right[1]} with {name}")
    print(f"memory: {memory}")
    return 0


def agreement(expected: Sequence[int], found: Sequence[int]) -> str:
    """Returns in words how many first tokens of two continuations agree."""
    if expected == found:
        return f"all {len(expected)} tokens agree" if len(expected) > 1 else "the token agrees"
    pairs = zip(expected, found, strict=False)  # one may have ended earlier
    same = next(
        (position for position, (one, other) in enumerate(pairs) if one != other), min(len(expected), len(found))
    )
    told = f"the first {same} of {len(expected)} tokens agree" if same else f"none of {len(expected)} tokens agrees"
    return f"{told}; after the first different token the two texts are not comparable"
