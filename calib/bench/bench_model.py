"""The loaded model of a bench, with all rows and contexts checked."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from calib import __version__
from calib.bench.peak import Peak
from calib.bench.request import BenchRequest, title_of
from calib.evaluate.entries import Given
from calib.evaluate.evaluation import VERSIONS
from calib.evaluate.loaded import check_model, loaded
from calib.runtime.artifact.fingerprint import fingerprint


@dataclass(frozen=True)
class BenchModel:
    """A request with its model loaded.

    Attributes:
        request: the request.
        given: the model and other inputs of every row.
        artifact_hash: SHA-256 of the artifact's file, None for none.
        attention: (configuration, attention implementation) of each part of the model before any of our caches was attached.
    """

    request: BenchRequest
    given: Given
    artifact_hash: str | None
    attention: list[tuple[Any, str | None]] = field(repr=False)

    @property
    def model(self) -> PreTrainedModel:
        """The model in evaluation mode, on its device."""
        return self.given.model

    @property
    def device(self) -> torch.device:
        """The model's device."""
        found: torch.device = self.model.device
        return found

    @cached_property
    def peak(self) -> Peak:
        """The measurement of memory in use on the model's device."""
        return Peak(self.device)

    @cached_property
    def weights(self) -> int:
        """Bytes of the model's parameters and buffers; shared storage is counted once."""
        held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in self.tensors()}
        return sum(held.values())

    def tensors(self) -> Iterator[Tensor]:
        """The model's parameters and buffers."""
        yield from self.model.parameters()
        yield from self.model.buffers()

    def prompt(self, batch: int, context: int) -> Tensor:
        """Returns random tokens [batch, context] int64, the same for every row of a table."""
        words = self.model.config.get_text_config(decoder=True).vocab_size
        drawn = torch.Generator().manual_seed(self.request.seed)
        return torch.randint(words, (batch, context), generator=drawn).to(self.device)

    @contextmanager
    def own_attention(self) -> Iterator[None]:
        """Context manager: the model uses its original attention implementation, for caches of transformers."""
        ours = [(config, config._attn_implementation_internal) for config, _ in self.attention]
        try:
            for config, name in self.attention:
                config._attn_implementation_internal = name
            yield
        finally:
            for config, name in ours:
                config._attn_implementation_internal = name

    def versions(self) -> dict[str, str]:
        """Returns the versions of the packages that the figures depend on."""
        return {"calib": __version__, **{name: version(name) for name in VERSIONS}}


def prepare(request: BenchRequest) -> BenchModel:
    """Loads the model and opens every row's cache once as a check; raises UsageError if the request cannot be run."""
    model, tokenizer, artifact, digest = loaded(
        request.model, request.dtype, request.device, request.artifact, request.threads
    )
    request.check_positions(positions(model))
    parts = {id(part.config): part.config for part in model.modules() if isinstance(part, PreTrainedModel)}
    attention = [(config, config._attn_implementation_internal) for config in parts.values()]
    given = Given(model, request.seed, artifact, fingerprint(model), tokenizer)
    for entry in request.methods:
        for context in request.contexts:
            with entry.refusing():
                entry.close(entry.open(given, title_of(context)))
    check_model(artifact, model)
    return BenchModel(request, given, digest, attention)


def positions(model: PreTrainedModel) -> int | None:
    """Returns the model's `max_position_embeddings`; None if its configuration has none."""
    found: int | None = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    return found
