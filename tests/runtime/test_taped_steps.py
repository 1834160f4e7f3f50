"""Decode steps launched from tapes (recorded launches): launches and arguments are those of steps without tapes."""

import ast
import copy
from unittest import mock

import pytest
import torch
from cases import BY_NAME, CASES, Case
from launches import KERNELS, WRITTEN, Launch, watch
from toy_models import left_padded, random_model

from calib.kernels.launch import launch
from calib.runtime import compress
from calib.runtime.attention import attention
from calib.runtime.memory import tensors
from calib.runtime.stages.transform.orthogonal import Orthogonal
from calib.runtime.tape import taped_steps
from calib.runtime.tape.recording import recorded
from calib.runtime.tape.structure import structure
from calib.runtime.tape.taped_steps import TapedSteps

LENGTHS, LAYERS = [9, 20], 3
LEVEL = [20, 20]  # windows of both rows are empty at once
STEPS = 26  # through a block of every short case

# Cases whose steps consist of kernel launches alone.
TAPED = {"full", "rtn-4", "kivi-2", "klt-short", "zipcache", "gear-60", "h2o", "mikv-16-2", "snapkv", "csr", "kvarn"}

# Cases and prompts after which a row takes a page beyond the room of the page table within STEPS steps.
WIDER = {
    "mikv": (Case("mikv-wider", "mikv", 0.0, {}), 316),
    "snapkv": (Case("snapkv-wider", "snapkv", 0.0, {"budget": 0.8}), 310),
    "rtn": (Case("rtn-wider", "rtn", 0.0, {"bits": 4}), 251),
}

FUSED = {"enable_fp_fusion": True}  # what every launch has unless it says otherwise

# Arguments that kernels fill, which do not run here.
NOT_FILLED = {"PLACED", "WAYS"}


@pytest.fixture(autouse=True)
def by_triton(monkeypatch):
    monkeypatch.setenv("CALIB_KERNELS", "triton")


def in_full(tapes, number, plan, way, layer, given, step):
    """Replaces `TapedSteps.run`: nothing is recorded."""
    return layer()


def drawn(config, width: int, generator: torch.Generator) -> list[torch.Tensor]:
    """Query, keys and values of both rows, of `width` tokens."""
    heads = (config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads)
    return [torch.randn(2, own, width, config.head_dim, generator=generator) for own in heads]


def noted(begin, answers: list[bool]):
    """Replaces `TapedSteps.begin`: its results are appended to `answers`."""

    def and_noted(tapes, *given):
        answers.append(begin(tapes, *given))
        return answers[-1]

    return and_noted


def launches_of(case: Case, lengths: list[int], found: list[Launch], free: int) -> tuple[list[list[Launch]], int]:
    """The launches of each step, and the number of layers' steps launched from tapes. No kernel runs. After the prompt every page
    table has `free` pages more."""
    model, mask = random_model("llama", num_hidden_layers=LAYERS), left_padded(lengths)["attention_mask"]
    modules, generator, steps = [layer.self_attn for layer in model.model.layers], torch.Generator().manual_seed(3), []
    with torch.no_grad(), case.open(model) as cache:
        for step in range(STEPS):
            mask = torch.nn.functional.pad(mask, (0, 1), value=1) if step else mask
            found.clear()
            for number, module in enumerate(modules):
                query, keys, values = drawn(model.config, 1 if step else max(lengths), generator)
                held = cache.update(keys, values, number)
                attention(module, query, *held, mask, scaling=0.1)
            if not step:
                for table in cache.sequences.tables:
                    table.prepare(free)
            steps.append(list(found))
        return steps, cache.sequences.taped.launched


def seen_as(part: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """`part` with the shape and strides of `like`, as a kernel reads it that is given those."""
    return part.as_strided(like.shape, like.stride(), part.storage_offset())


def taped_as_in_full(case: Case, lengths: list[int], monkeypatch, free: int = 0) -> int:
    """Asserts that each launch is that of a step without tapes; returns the number of layers' steps launched from tapes."""
    found, of_block = watch(monkeypatch, runs=False, copies=True), []
    with mock.patch.object(TapedSteps, "begin", noted(TapedSteps.begin, of_block)):
        taped, launched = launches_of(case, lengths, found, free)
    with (
        mock.patch.object(TapedSteps, "run", in_full),
        mock.patch.object(TapedSteps, "begin", side_effect=of_block),
    ):
        full, none = launches_of(case, lengths, found, free)
    assert not none
    for own, other in zip(taped, full, strict=True):
        assert [launch.kernel for launch in own] == [launch.kernel for launch in other]
        for one, same in zip(own, other, strict=True):
            assert (one.grid, one.numbers) == (same.grid, same.numbers)
            for name, part in same.arguments.items():
                if isinstance(part, torch.Tensor) and name not in NOT_FILLED:
                    assert part.dtype == one.arguments[name].dtype
                    assert torch.equal(seen_as(one.arguments[name], part), part), (one.kernel, name)
    return launched


@pytest.mark.full
@pytest.mark.parametrize("lengths", [LENGTHS, LEVEL], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_tape_launches_what_the_layer_would(case: Case, lengths, monkeypatch):
    launched = taped_as_in_full(case, lengths, monkeypatch)
    assert launched >= STEPS or case.name not in TAPED


@pytest.mark.full
@pytest.mark.parametrize(("case", "length"), WIDER.values(), ids=list(WIDER))
def test_a_row_takes_a_free_page_beyond_the_room(case: Case, length: int, monkeypatch):
    """From that step on the tensor of page numbers is wider, in other memory, while no table's capacity grows."""
    assert taped_as_in_full(case, [120, length], monkeypatch, free=6) >= STEPS


def own_steps(model, cache, count: int, width: int = 1) -> None:
    """`count` forwards through every layer's attention, of `width` tokens each."""
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for _ in range(count):
            for number, layer in enumerate(model.model.layers):
                query, keys, values = drawn(model.config, width, generator)
                held = cache.update(keys, values, number)
                attention(layer.self_attn, query, *held, None, scaling=0.1)


@pytest.fixture
def opened(monkeypatch):
    """A model, and a cache of `kivi` on it with a prompt of 20 tokens; no kernel runs."""
    watch(monkeypatch, runs=False)
    model = random_model("llama", num_hidden_layers=LAYERS)
    with compress(model, "kivi", bits=2) as cache:
        own_steps(model, cache, 1, 20)
        yield model, cache


def test_all_layers_but_the_first_are_launched_from_the_third_step_on(opened):
    model, cache = opened
    own_steps(model, cache, 2)
    assert cache.sequences.taped.launched == 0
    own_steps(model, cache, 3)
    assert cache.sequences.taped.launched == 3 * (LAYERS - 1)
    assert {layer.get_seq_length() for layer in cache.compressed} == {25}
    assert cache.sequences.lengths == [25] * len(LENGTHS)


def test_a_block_goes_on_behind_a_step_that_encodes_into_memory_that_is_there(monkeypatch):
    """In `klt` every step that encodes does so, until a row needs another page."""
    watch(monkeypatch, runs=False)
    model, launched = random_model("llama", num_hidden_layers=LAYERS), [0]
    with BY_NAME["klt-short"].open(model) as cache:  # blocks of 8
        own_steps(model, cache, 1, 40)
        for _ in range(60):
            own_steps(model, cache, 1)
            launched.append(cache.sequences.taped.launched)
    none = [step for step in range(1, 61) if launched[step] == launched[step - 1]]
    assert none == [1, 2, *range(8, 60, 8), 57]  # 57 records the next block


@pytest.mark.parametrize("change", ["reorder", "copy", "several tokens", "device", "interrupted by a prompt's end"])
def test_tapes_are_forgotten_where_memory_or_rows_change(opened, change):
    model, cache = opened
    own_steps(model, cache, 4)
    before = cache.sequences.taped.launched
    if change == "reorder":
        cache.reorder_cache(torch.tensor([1, 0]))
    if change == "copy":
        cache, before = copy.deepcopy(cache), 0
    if change == "several tokens":
        own_steps(model, cache, 1, 2)
    if change == "device":
        for layer in cache.compressed:
            layer.to(torch.device("cpu"))
    if change == "interrupted by a prompt's end":
        for layer in cache.compressed:
            keys, values = drawn(model.config, 1, torch.Generator().manual_seed(5))[1:]
            layer.fill(keys, values, None, layer.get_seq_length() + 1)
    if change in ("reorder", "copy", "device"):  # at once, because tapes refer to memory that has been replaced
        assert not cache.sequences.taped._tapes
    # The block after one that was launched from tapes is recorded in its first step; a copy has had no such block.
    own_steps(model, cache, 2 if change == "copy" else 1)
    assert cache.sequences.taped.launched == before
    own_steps(model, cache, 1)
    assert cache.sequences.taped.launched == before + LAYERS - 1


def test_between_steps_a_tape_holds_nothing_of_them(opened):
    """Neither temporary memory of kernels nor a layer's inputs: all tensors of tapes are in the stores."""
    model, cache = opened
    own_steps(model, cache, 5)
    held = [
        part
        for _, tape in cache.sequences.taped._tapes.values()
        if tape is not None
        for launch, _ in tape.launches
        for part in launch.arguments
        if isinstance(part, torch.Tensor)
    ]
    own = {part.untyped_storage().data_ptr() for part in tensors([layer.store for layer in cache.compressed])}
    assert held and {part.untyped_storage().data_ptr() for part in held} <= own
    assert not cache.sequences.forward.readings


class Shown:
    """Stands for a forward whose layers share `readings`."""

    def __init__(self, readings: dict[str, object]) -> None:
        self.readings = readings

    @property
    def worked_out(self) -> dict[str, object]:
        return dict(self.readings)


class TestWhatIsRecorded:
    """Tapes of layers that are written here, which launch stand-in kernels on memory that they allocate."""

    @pytest.fixture
    def step(self):
        return Shown({"mask": (torch.zeros(4), "not one")})

    def test_every_tensor_comes_from_where_it_came_from(self, step):
        """Inputs, shared tensors, allocated ones and the layer's own, whole or in part, are found again when a tape runs."""
        own, seen = torch.full((2,), 7.0), []

        class Kernel:
            def __getitem__(self, grid):
                return lambda out, *rest, **options: (
                    seen.append(([part.clone() for part in rest], grid, options)),
                    out.fill_(len(seen)),
                )

        def layer(query, values):
            middle, out = torch.empty(6), torch.empty(2, 3)
            mask = step.readings["mask"][0]
            launch(Kernel(), (1, 2), middle[2:], query, mask[1:3], own, WIDE=4)
            launch(Kernel(), (3,), out.view(6), middle[2:].view(2, 2), values)
            return out.view(3, 2)

        query, values = torch.ones(3), torch.ones(2)
        output, tape, _ = recorded(lambda: layer(query, values), (query, values), step)
        assert tape is not None and output.tolist() == [[2.0, 2.0]] * 3
        query, values = torch.full((3,), 2.0), torch.full((2,), 3.0)
        step = Shown({"mask": (torch.arange(4.0), "not one")})
        again = tape.run((query, values), step)
        assert again.tolist() == [[4.0, 4.0]] * 3 and again.data_ptr() != output.data_ptr()
        (first, grid, options), (second, other, none) = seen[2:]
        assert [part.tolist() for part in first] == [[2.0] * 3, [1.0, 2.0], [7.0, 7.0]]
        assert [part.tolist() for part in second] == [[[3.0, 3.0]] * 2, [3.0, 3.0]]
        assert (grid, other, options, none) == ((1, 2), (3,), {"WIDE": 4} | FUSED, FUSED)
        # If the step has no shared tensor that the tape needs, nothing is launched.
        assert tape.run((query, values), Shown({})) is None and len(seen) == 4

    @pytest.mark.parametrize(
        "what",
        ["an operator", "a number of the host", "work for all", "a piece of what is given", "no memory of its own"],
    )
    def test_what_a_tape_cannot_do_again_is_not_recorded(self, step, what):
        given = torch.ones(4)

        class Kernel:
            def __getitem__(self, grid):
                return lambda out, *rest, **options: out.fill_(1)

        def layer():
            out = torch.empty(4)
            launch(Kernel(), (1,), out, given[1:] if what == "a piece of what is given" else given)
            if what == "an operator":
                out.add_(1)
            if what == "a number of the host":
                launch(Kernel(), (1,), out, torch.tensor([3.0]))
            if what == "work for all":
                step.readings["more"] = 1
            return given if what == "no memory of its own" else out

        output, tape, outline = recorded(layer, (given,), step)
        assert tape is None and outline is None and output.shape == (4,)


class Named:
    """A kernel that fills its first argument with 1, and lists its launches."""

    def __init__(self) -> None:
        self.seen = []

    def __getitem__(self, grid):
        def start(out, *rest, **options):
            self.seen.append(
                (grid, [part.clone() if isinstance(part, torch.Tensor) else part for part in rest], options)
            )
            out.fill_(1)

        return start


class TestOfAnOutline:
    """A layer that is recorded by the outline of another: where each argument of a launch comes from."""

    @pytest.fixture
    def kernels(self):
        return Named(), Named()

    @staticmethod
    def layer(kernels, given, step, own, size, change=None):
        """A layer of two launches on `size` numbers; `change` makes it differ from the outline."""
        first, second = kernels[::-1] if change == "other kernels" else kernels
        query, values = given[::-1] if change == "what is given, swapped" else given
        mask = step.readings["mask"][0]

        def run():
            middle, out = torch.empty(2 * size), torch.empty(size)
            if change == "work for all":
                step.readings["more"] = 1
            if change == "one launch less":
                launch(second, (size,), out)
                return out
            part = mask if change == "the step's instead of its own" else own
            fresh = torch.empty(size)
            launch(
                first,
                (size, 2),
                fresh if change == "other memory" else middle[size:],
                query,
                mask[1:3],
                part,
                None,
                size,
            )
            last = part if change == "its own instead of the step's" else mask
            last = None if change == "nothing instead of a tensor" else last
            launch(second, (size,), out, middle[size:], values, last)
            return out

        return run

    def outlined(self, kernels):
        """The outline of a layer of 3 numbers."""
        given, step = (torch.ones(3), torch.ones(2)), Shown({"mask": (torch.zeros(4), "not one")})
        _, tape, outline = recorded(self.layer(kernels, given, step, torch.full((2,), 7.0), 3), given, step)
        assert tape is not None
        return outline

    def test_sizes_grids_and_memory_are_its_own(self, kernels):
        outline = self.outlined(kernels)
        given, step = (
            (torch.ones(3), torch.ones(2)),
            Shown({"more": torch.ones(1), "mask": (torch.zeros(9), "not one")}),
        )
        output, tape = outline.recorded(self.layer(kernels, given, step, torch.full((2,), 8.0), 5), given, step)
        assert tape is not None and output.tolist() == [1.0] * 5
        given, step = (torch.full((3,), 2.0), torch.full((2,), 3.0)), Shown({"mask": (torch.arange(9.0), "not one")})
        again = tape.run(given, step)
        assert again.tolist() == [1.0] * 5 and again.data_ptr() != output.data_ptr()
        (grid, (query, mask, own, none, size), _), (other, (middle, values, whole), _) = (
            one.seen[-1] for one in kernels
        )
        assert (grid, other, none, size) == ((5, 2), (5,), None, 5)
        assert (query.tolist(), mask.tolist(), own.tolist()) == ([2.0] * 3, [1.0, 2.0], [8.0, 8.0])
        assert (middle.tolist(), values.tolist(), whole.tolist()) == ([1.0] * 5, [3.0, 3.0], list(range(9)))

    @pytest.mark.parametrize(
        "change",
        [
            "other kernels",
            "what is given, swapped",
            "work for all",
            "one launch less",
            "the step's instead of its own",
            "its own instead of the step's",
            "other memory",
            "nothing instead of a tensor",
        ],
    )
    def test_a_layer_that_does_something_else_has_no_tape(self, kernels, change):
        outline = self.outlined(kernels)
        given, step = (torch.ones(3), torch.ones(2)), Shown({"mask": (torch.zeros(4), "not one")})
        run = self.layer(kernels, given, step, torch.full((2,), 8.0), 5, change)
        output, tape = outline.recorded(run, given, step)
        assert tape is None and output.tolist() == [1.0] * 5


def test_where_tensors_come_from_is_found_out_once(opened, monkeypatch):
    """With equal plans all layers but the first recorded one, and all in later blocks, are recorded by its outline."""
    model, cache = opened
    found = []
    monkeypatch.setattr(taped_steps, "recorded", lambda *given: found.append(given) or recorded(*given))
    own_steps(model, cache, 45)  # the window gets more memory at 32 tokens, and at 64
    assert len(found) == 1
    assert cache.sequences.taped.launched == (LAYERS - 1) * (45 - 2 - 2)


def test_plans_are_alike_whatever_their_tensors_say():
    model = random_model("llama", num_hidden_layers=LAYERS)
    with compress(model, "kivi", bits=2) as cache, compress(model, "kivi", bits=4) as other:
        kinds = {structure(layer.plan) for layer in cache.compressed}
        assert len(kinds) == 1 and not kinds & {structure(layer.plan) for layer in other.compressed}
    one, same = (Orthogonal(torch.full((2, 3, 3), float(number))) for number in range(2))
    assert structure(one) == structure(same) != structure(Orthogonal(torch.zeros(2, 4, 4)))
    thing, unhashable = object(), bytearray()
    assert structure([thing, 1.0]) == structure([thing, 1.0]) != structure([object(), 1.0])
    assert structure(unhashable) != structure(unhashable)


def test_every_kernel_is_started_by_launch():
    """A kernel that is started in another way would be missing on a tape."""
    files = {path: ast.parse(path.read_text()) for path in sorted(KERNELS.glob("*/*.py"))}
    nodes = [node for tree in files.values() for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    kernels = {node.name for node in nodes if any("triton.jit" in ast.unparse(part) for part in node.decorator_list)}
    assert set(WRITTEN) <= kernels
    for code in ("attend[(2,)](x, y)", "if x:\n    y = exact[(n[0], most[1])](x, BD=32)", "triton.put[grid]()"):
        assert started_by_grid(ast.parse(code), kernels)
    assert not started_by_grid(ast.parse("launch(attend, (n[0],), x, sizes[0](y))"), kernels)
    for path, tree in files.items():
        assert not started_by_grid(tree, kernels), path


def started_by_grid(tree: ast.AST, kernels: set[str]) -> list[str]:
    """The kernels that code starts as `kernel[grid](...)`."""
    calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    names = [ast.unparse(func.value).split(".")[-1] for func in calls if isinstance(func, ast.Subscript)]
    return [name for name in names if name in kernels]
