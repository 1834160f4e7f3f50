"""A row with one of our own methods."""

from dataclasses import dataclass
from typing import Any

from transformers.cache_utils import Cache

from calib.errors import UsageError
from calib.evaluate.cache_size import CacheSize
from calib.evaluate.entries.entry import MAPPINGS, CacheEntry, Given, is_mapping
from calib.evaluate.tasks import Column
from calib.runtime import compress
from calib.runtime.cache import CompressedCache
from calib.runtime.files.canonical_json import plain
from calib.runtime.messages.printable import printable
from calib.runtime.methods import Geometry, Method, build, options_asked
from calib.runtime.methods.paper_counting import CountedCache


@dataclass(frozen=True)
class MethodEntry(CacheEntry):
    """`{method: kivi, bits: 2}`.

    Attributes:
        name: a name from `calib methods`.
        uses_artifact: whether the method gets the artifact; without one it works as published.
    """

    name: str
    uses_artifact: bool = False

    @staticmethod
    def of(label: str, group: str, name: str, options: dict[str, Any]) -> "MethodEntry":
        """Builds the row from the options of the configuration; their entry `artifact` sets `uses_artifact`.

        By default a row uses the artifact if its options, or a mapping of `MAPPINGS`, have `statistics: calibrated`.
        """
        parts = [options, *(options.get(name) for name in MAPPINGS)]
        calibrated = any(is_mapping(part) and part.get("statistics") == "calibrated" for part in parts)
        uses = options.pop("artifact", calibrated)
        if not isinstance(uses, bool):
            raise UsageError(f"methods: '{label}': artifact must be true or false, got {printable(uses)}")
        return MethodEntry(label, group, options, name, uses)

    @property
    def method(self) -> str:
        return self.name

    def build(self, title: str) -> Method:
        """Builds the method for the column `title`; raises UsageError for invalid options."""
        with self.refusing():
            return build(self.name, self.options_for(title))

    def all_options(self, title: str) -> dict[str, Any]:
        options: dict[str, Any] = plain(options_asked(self.build(title)), self.label)
        return options

    def serves(self, column: Column) -> bool:
        return True

    def open(self, given: Given, title: str) -> CompressedCache:
        artifact = given.artifact if self.uses_artifact else None
        options = self.options_for(title)
        return compress(given.model, self.name, artifact, seed=given.seed, tokenizer=given.tokenizer, **options)

    def close(self, cache: Cache) -> None:
        assert isinstance(cache, CompressedCache)
        cache.release()

    def cache_size(self, given: Given, cache: Cache, tokens: int) -> CacheSize:
        assert isinstance(cache, CompressedCache)
        return CacheSize.of(cache.memory())  # the cache counts its tokens itself

    def counted_bits(self, given: Given, column: Column) -> float | None:
        shape = Geometry.of(given.model.config.get_text_config(decoder=True))
        width = shape.kv_heads * shape.head_dim
        return self.build(column.title).paper_bits(CountedCache(shape.head_dim, width, column.prompt, column.length))
