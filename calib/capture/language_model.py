"""Loads the model to be measured, and turns each failure into one line with its reason."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr
from io import StringIO
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

import huggingface_hub.constants
import torch
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError
from torch.nn import ModuleList
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from calib.capture.device_map import MaxMemory
from calib.capture.gguf_rope import check_rope
from calib.capture.gguf_tokens import without_unnamed_tokens
from calib.capture.model_files import ModelFiles
from calib.capture.model_sizes import check_sizes
from calib.errors import UsageError
from calib.runtime.messages.printable import printable

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "auto": "auto"}


def load(
    path: str, dtype: str, device_map: str | None = None, max_memory: MaxMemory | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Returns the causal language model, in evaluation mode and without gradients, and its tokenizer.

    Args:
        path: a local folder, a GGUF file (its weights are dequantised) or a name on the Hugging Face hub.
        dtype: `float32`, `bfloat16`, `float16`, or `auto`: the dtype in which the weights are stored.
        device_map: how accelerate spreads the model over devices; None loads it on the CPU.
        max_memory: memory that the map may use of each GPU (by number) and of `cpu`; other weights stay on disk.

    Raises:
        UsageError: an unknown dtype, no such model, or not a causal language model that can be read.
    """
    check_dtype(dtype, "dtype")
    found = ModelFiles.find(path)
    # Dequantising shows a tqdm bar that no log level of transformers switches off.
    quiet = nullcontext() if found.gguf is None else redirect_stderr(StringIO())
    with without_waiting_for_the_hub(), without_notes(), quiet:
        try:
            config = AutoConfig.from_pretrained(found.path, **found.options)
            check_sizes(config, path)
            check_rope(found, config)
            tokenizer = AutoTokenizer.from_pretrained(found.path, **found.options)
            bounds = None if max_memory is None else dict(max_memory)  # accelerate writes numbers into it
            model, loaded = AutoModelForCausalLM.from_pretrained(
                found.path,
                config=config,
                dtype=DTYPES[dtype],
                device_map=device_map,
                max_memory=bounds,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # refused below, by name
                **found.options,
            )
        except UsageError:
            raise
        except Exception as error:  # transformers raises many types; all mean that the model cannot be loaded
            # The first line of its messages says what happened; further lines are advice.
            reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
            if found.local:
                raise UsageError(f"cannot load the model in '{path}' ({reason})") from error
            raise UsageError(why_the_hub_gave_none(path, error, reason)) from error
    check_complete(loaded, path)
    check_used(loaded, model, path)
    if found.gguf is not None:
        without_quantization(model)
        without_unnamed_tokens(found, tokenizer, model)
    return model.eval().requires_grad_(False), tokenizer


def check_complete(loaded: dict[str, Any], path: str) -> None:
    """Raises UsageError if `loaded`, transformers' report on the model at `path`, names weights that the files lack or have in
    another shape: transformers draws these at random."""
    remedy = "give all files of one checkpoint, with its own config.json"
    if wrong := sorted(loaded["mismatched_keys"]):
        name, stored, wanted = wrong[0]
        raise UsageError(
            f"the model in '{path}' has {name} with shape {list(stored)}, expected {list(wanted)} by its configuration; {remedy}"
        )
    if missing := sorted(loaded["missing_keys"]):
        more = f" and {len(missing) - 1} more weights" * (len(missing) > 1)
        raise UsageError(f"the model in '{path}' lacks {missing[0]}{more} of its configuration; {remedy}")


def check_used(loaded: dict[str, Any], model: PreTrainedModel, path: str) -> None:
    """Raises UsageError if the files have weights that change the model's outputs and that its configuration leaves out.

    These are layers behind the last one, except those for multi-token prediction, and parameters that a module of the model can
    have, such as a projection's bias. Other weights that transformers does not load pass: towers of other modalities, buffers of
    older releases, scales of a quantised cache.
    """
    more = getattr(model.config.get_text_config(decoder=True), "num_nextn_predict_layers", None) or 0
    if unused := sorted(name for name in loaded["unexpected_keys"] if left_out(name, model, more)):
        others = f" and {len(unused) - 1} more weights" * (len(unused) > 1)
        raise UsageError(
            f"the model in '{path}' has {unused[0]}{others} that its configuration leaves out; give all files of one "
            "checkpoint, with its own config.json"
        )


def left_out(name: str, model: PreTrainedModel, more: int) -> bool:
    """Returns whether `name` is a weight of a list's module behind its last one and `more`, or a parameter switched off."""
    module: Any = model
    *path, parameter = name.split(".")
    for part in path:
        children = dict(module.named_children())
        if part not in children:
            return isinstance(module, ModuleList) and part.isdecimal() and int(part) >= len(module) + more
        module = children[part]
    return parameter in module._parameters and module._parameters[parameter] is None


def without_quantization(model: PreTrainedModel) -> None:
    """Removes the marks of quantisation from a model whose weights were dequantised while loading."""
    model.is_quantized = False
    for owner, name in ((model, "hf_quantizer"), (model, "quantization_method"), (model.config, "quantization_config")):
        if hasattr(owner, name):
            delattr(owner, name)


def why_the_hub_gave_none(path: str, error: BaseException, reason: str) -> str:
    """Returns one line for a hub name that could not be loaded, with the reason and the remedy.

    Args:
        path: the name.
        error: the exception; its causes are searched for errors of huggingface_hub.
        reason: the error's type and first line.
    """
    causes: list[Any] = []
    cause: Any = error
    while cause is not None and cause not in causes:
        causes.append(cause)
        cause = cause.__cause__ or cause.__context__
    answers = (getattr(cause, "response", None) for cause in causes if isinstance(cause, HfHubHTTPError))
    status = next((answer.status_code for answer in answers if answer is not None), None)
    gated = any(isinstance(cause, GatedRepoError) for cause in causes)
    if not gated and any(isinstance(cause, RepositoryNotFoundError) for cause in causes):
        return (
            f"the Hugging Face hub knows no model '{path}', or it is private (status {status}): check the name, log in with "
            "`hf auth login`, or name a folder that holds the model"
        )
    if gated or status in (401, 403):
        return (
            f"the Hugging Face hub does not give '{path}' to you yet (status {status}): accept its licence at "
            f"{huggingface_hub.constants.ENDPOINT}/{path} and log in with `hf auth login`, or name a folder that holds the model"
        )
    answer = "cannot be reached" if huggingface_hub.constants.HF_HUB_OFFLINE else "gave none"
    return (
        f"no folder '{path}' here, and the Hugging Face hub {answer} ({reason}); a gated model wants its licence accepted on its "
        "page and `hf auth login`; without network name a folder that holds the model"
    )


@contextmanager
def without_waiting_for_the_hub() -> Iterator[None]:
    """Context in which the hub's offline mode is on if the hub cannot be reached: no half minute of retries.

    Files in the download cache are still used. Behind a proxy the hub counts as reachable, since its name may not resolve
    on this machine.
    """
    before = huggingface_hub.constants.HF_HUB_OFFLINE
    huggingface_hub.constants.HF_HUB_OFFLINE = before or not hub_answers()
    try:
        yield
    finally:
        huggingface_hub.constants.HF_HUB_OFFLINE = before


def hub_answers() -> bool:
    """Returns whether the hub's address accepts a connection within three seconds; True behind a proxy."""
    address = urlsplit(huggingface_hub.constants.ENDPOINT)
    if getproxies():
        return True
    try:
        port = address.port or (443 if address.scheme == "https" else 80)
        with socket.create_connection((address.hostname or "", port), timeout=3):
            return True
    except OSError:
        return False


@contextmanager
def without_notes() -> Iterator[None]:
    """Context in which transformers shows no progress bars and logs errors only."""
    level, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bar:
            logging.enable_progress_bar()


def check_dtype(dtype: str, option: str = "model.dtype") -> str:
    """Returns `dtype` if it is a key of `DTYPES`; else raises UsageError with the option and its choices."""
    if dtype not in DTYPES:
        raise UsageError(f"{option}={printable(dtype)}: one of {', '.join(DTYPES)}")
    return dtype
