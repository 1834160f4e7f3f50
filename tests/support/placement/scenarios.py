"""SpeCache, InfLLM and offload with options, and the forwards they go through."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from importance.scenarios import HEADS
from layer_walk import Tokens
from placement.spec import Attending
from toy_models import COMMON, random_model
from transformers import StableLmConfig, StableLmForCausalLM
from walk_steps import Step, drafted, moved, single, speculated, turn

from calib.runtime import compress
from calib.runtime.cache import CompressedCache

# Marks speculative tokens: float16, bfloat16 and float32 hold it exactly, no number drawn or computed in these tests equals it, and
# it is too small to change outputs.
MAGIC = 21 * 2.0**-24

LOGITS = ("softcap", "sliding", "scale")  # a scenario's numbers by which the model computes logits


WALKS: dict[str, list[Step]] = {
    "guesses": turn(70, 37, 12) + speculated(1, 3, 0) + speculated(32, 3),
    "no first guess": turn(45, 45) + speculated(40, 2),
    "crossing": turn(61, 20) + speculated(1, 2, 0) + speculated(104, 2),
    "pages": turn(250, 120)
    + speculated(1, 2, 0)
    + speculated(20, 2)
    + turn(130, 40)
    + speculated(1, 2, 0)
    + speculated(12, 2),
    "turns": turn(70, 20, 33)
    + speculated(1, 3, 0)
    + speculated(18, 3)
    + turn(9, 30, 2)
    + speculated(1, 3, 0)
    + speculated(15, 3)
    + turn(40, 3, 64)
    + speculated(9, 3),
    "from one": turn(1) + speculated(75, 1),
    "singles": turn(70, 37, 12) + single(30, 3),
    "singles and turns": turn(50, 20) + single(20, 2) + turn(33, 40) + single(15, 2),
    "mixed": turn(66, 31)
    + (speculated(1, 2, 0) + speculated(6, 2) + single(3, 2) + speculated(2, 2) + single(1, 2)) * 3
    + turn(5, 20)
    + single(3, 2)
    + speculated(4, 2),
    "rows": turn(70, 37, 12)
    + speculated(1, 3, 0)
    + speculated(10, 3)
    + moved(2, 0, 0)
    + speculated(25, 3)
    + moved(1, 2)
    + speculated(1, 2, 0)
    + turn(7, 40)
    + moved(1, 1, 0, 1)
    + speculated(12, 4)
    + single(2, 4),
    # Rows whose first tokens come later than others', before and after speculative steps.
    "late": turn(60, 0, 5)
    + single(2, 3)
    + speculated(3, 3)
    + turn(3, 41, 2)
    + speculated(1, 3, 0)
    + speculated(5, 3)
    + single(3, 3),
    "late guess": turn(60, 0, 5) + speculated(1, 3, 0) + turn(3, 41, 2) + speculated(3, 3),
    "unequal": turn(60, 30, 50)
    + speculated(3, 3)
    + turn(3, 1, 20)
    + speculated(4, 3)
    + turn(1, 0, 0)
    + speculated(4, 3),
    # More rows than are attended together.
    "many rows": turn(*[50, 40] * 20)
    + speculated(1, 40, 0)
    + speculated(2, 40)
    + single(2, 40)
    + turn(*[3] * 40)
    + speculated(2, 40),
    # Prompt lookup and assisted decoding: drafts with the prompt, of which some, all and none are accepted, and single tokens.
    "drafts": drafted(50, 33, rejected=2)
    + drafted(3, 3, rejected=2)
    + drafted(1, 1)
    + drafted(1, 1, rejected=4)
    + drafted(0, 0, rejected=1)
    + drafted(6, 6)
    + drafted(20, 9, rejected=7)
    + drafted(0, 0, rejected=3)
    + drafted(2, 0, rejected=2)
    + moved(1, 0)
    + drafted(5, 5, rejected=1)
    + drafted(1, 1)
    + single(2, 2),
    "drafts and guesses": turn(40, 20)
    + speculated(1, 2, 0)
    + speculated(3, 2)
    + drafted(3, 3, rejected=2)
    + drafted(1, 1)
    + speculated(1, 2, 0)
    + speculated(4, 2)
    + drafted(33, 33, rejected=1)
    + speculated(2, 2),
    # InfLLM and offload.
    "steps": turn(70, 37, 12) + single(45, 3),
    "chunks": turn(75) + turn(5) + single(6, 1) + turn(13) + turn(40) + single(8, 1) + turn(2) + single(3, 1),
    "ragged": turn(70, 37, 12) + single(4, 3) + turn(9, 30, 2) + single(7, 3) + turn(40, 3, 64) + single(5, 3),
    "late rows": turn(60, 0, 5) + turn(3, 41, 0) + single(10, 3) + turn(0, 20, 30) + single(5, 3),
    "long": turn(300) + single(15, 1) + turn(150) + single(9, 1),
    "one by one": single(75, 2),
    "many chunks": turn(*[50, 40] * 20) + single(4, 40) + turn(*[3] * 40) + single(2, 40),
    "rows of chunks": turn(70, 50, 12)
    + single(5, 3)
    + moved(1, 0, 0)
    + single(12, 3)
    + turn(3, 20, 8)
    + moved(2, 1)
    + single(10, 2),
}


@dataclass(frozen=True)
class Scenario:
    """A method with options, the model's soft cap, sliding window and scale of logits (None: D^-1/2), its `rope_parameters` if not
    the default, and a walk."""

    method: str
    options: dict[str, Any] = field(default_factory=dict)
    walk: str = "guesses"
    gqa: int = 2
    dtype: torch.dtype = torch.float32
    softcap: float | None = None
    sliding: int | None = None
    scale: float | None = None
    layers: int = 1
    rope: dict[str, Any] | None = None

    def __str__(self) -> str:
        options = " ".join(f"{name}={value}" for name, value in self.options.items())
        dtype = "" if self.dtype == torch.float32 else str(self.dtype).removeprefix("torch.")
        rest = [f"{name} {getattr(self, name)}" for name in LOGITS if getattr(self, name)]
        rest += [self.rope["rope_type"]] if self.rope else []
        return ", ".join(filter(None, [self.method, options, self.walk, f"gqa {self.gqa}", dtype, *rest]))

    @cached_property
    def model(self) -> Any:
        heads, kv_heads = HEADS[self.gqa]
        shape = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "num_hidden_layers": self.layers}
        rope = {"rope_parameters": self.rope} if self.rope else {}
        if "partial_rotary_factor" in rope.get("rope_parameters", {}):  # only StableLM has partial RoPE
            config = StableLmConfig(**COMMON | {"hidden_size": 32 * heads, "head_dim": 32} | shape | rope)
            return StableLmForCausalLM(config).to(self.dtype).eval()
        if self.sliding is not None:
            return random_model("mistral-sliding", self.dtype, sliding_window=self.sliding, **shape)
        return random_model("llama", self.dtype, **shape, **rope)

    @property
    def attending(self) -> Attending:
        """How the model computes logits."""
        usual = self.model.config.head_dim**-0.5
        return Attending(usual if self.scale is None else self.scale, self.softcap, self.sliding)

    @property
    def steps(self) -> list[Step]:
        return WALKS[self.walk]

    @property
    def chunk(self) -> int | None:
        """The tokens that InfLLM encodes together; None: all of a forward."""
        return self.options["chunk"] if self.options.get("prefill") == "blocks" else None

    @property
    def low(self) -> dict[str, Any]:
        """Method and options of SpeCache's low-bit copy."""
        if self.options.get("low") is not None:
            return dict(self.options["low"])
        usual = {"bits": 2, "group": 32, "residual": 64}
        low = usual | {name: value for name, value in self.options.items() if name in (*usual, "clip")}
        middle = {1: 0.5}  # eq. 3
        clip = low["bits"]
        clip = middle.get(clip) if isinstance(clip, int) else {role: middle.get(bits) for role, bits in clip.items()}
        return {"method": "kivi", "clip": clip} | low

    def open(self) -> CompressedCache:
        """An empty cache, detached from the model."""
        return self._opened(self.method, self.options)

    def open_twin(self) -> CompressedCache | None:
        """An empty cache of the contained method: for SpeCache its low-bit method, for `offload` "full"; None for InfLLM."""
        if self.method == "infllm":
            return None
        low = {"method": "full"} if self.method == "offload" else self.low
        return self._opened(low["method"], {name: value for name, value in low.items() if name != "method"})

    def _opened(self, method: str, options: dict[str, Any]) -> CompressedCache:
        cache = compress(self.model, method, **options)
        cache.release()
        return cache

    def tokens(self) -> list[Tokens]:
        """The tokens of every row for all steps of the walk; as many rows as its largest step has."""
        rows = max(len(step.sizes) for step in self.steps)
        count = [sum(step.sizes[row] for step in self.steps if row < len(step.sizes)) for row in range(rows)]
        return [Tokens.random(self.model, max(1, size), row) for row, size in enumerate(count)]

    def rejected_tokens(self, number: int, rows: int, count: int) -> list[Tokens]:
        """Rejected drafts of every row."""
        return [Tokens.random(self.model, count, 20_000 + 10 * number + row) for row in range(rows)]

    def speculative_tokens(self, number: int, rows: int) -> list[Tokens]:
        """A speculative token of every row; one channel of each key and one of each value is MAGIC."""
        found = [Tokens.random(self.model, 1, 10_000 + 10 * number + row) for row in range(rows)]
        for speculative in found:
            speculative.keys[..., 3] = speculative.values[..., 5] = MAGIC
        return found


def specache(walk: str = "guesses", gqa: int = 2, dtype: torch.dtype = torch.float32, **rest: Any) -> Scenario:
    """A SpeCache scenario with a short window, so that most tokens are encoded."""
    own = {name: rest.pop(name) for name in (*LOGITS, "layers") if name in rest}
    usual = {} if "low" in rest else {"residual": 32}
    return Scenario("specache", {"k": 5} | usual | rest, walk, gqa, dtype, **own)


def infllm(walk: str = "steps", gqa: int = 2, dtype: torch.dtype = torch.float32, **rest: Any) -> Scenario:
    """An InfLLM scenario with a short window and small blocks, most of which are not fetched."""
    own = {name: rest.pop(name) for name in (*LOGITS, "layers", "rope") if name in rest}
    usual = {"initial": 4, "window": 24, "block": 8, "representatives": 2, "fetched": 3, "prefill": "exact"}
    return Scenario("infllm", usual | rest, walk, gqa, dtype, **own)


def by_blocks(walk: str = "steps", chunk: int = 16, gqa: int = 2, **rest: Any) -> Scenario:
    """An InfLLM scenario whose forwards are processed in chunks."""
    return infllm(walk, gqa, prefill="blocks", chunk=chunk, **rest)


def offload(walk: str = "ragged", gqa: int = 2, dtype: torch.dtype = torch.float32, **rest: Any) -> Scenario:
    """A scenario of `offload`, which keeps all tokens exactly."""
    own = {name: rest.pop(name) for name in (*LOGITS, "layers") if name in rest}
    return Scenario("offload", rest, walk, gqa, dtype, **own)


def cut(rows: Sequence[Tokens], at: list[int], sizes: Sequence[int]) -> list[Tokens]:
    """The next `sizes` tokens of each row; the positions `at` are advanced."""
    found = [row[start : start + size] for row, start, size in zip(rows, at, sizes, strict=False)]
    at[: len(sizes)] = [start + size for start, size in zip(at, sizes, strict=False)]
    return found
