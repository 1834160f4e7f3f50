"""Times batched matching pursuit on the CPU against a loop over vectors and scikit-learn, and its two forms against each other.

    python -m benchmarks.pursuit_cpu [--vectors 2048] [--atoms 4096] [--threads 2] [--write]

One process, float32, normal data, new vectors in every turn. All steps are timed in every turn, in another order each turn; results
are medians and quartiles of the ratios within turns, beside an A/A pair. Before anything is timed the results are compared.
scikit-learn gets its inputs in the layout it needs, with its default settings.
Then the time of a Gram matrix in ordinary and in large memory pages; and mean |x - x^|^2 / |x|^2 of both pursuits: on normal data,
on clusters, and on the embedded model's own keys (before RoPE) and values, with centroids of other vectors of the layer as
dictionary.
"""

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch
from sklearn.linear_model import orthogonal_mp
from threadpoolctl import threadpool_limits
from torch import Tensor
from torch.nn.functional import normalize

from benchmarks.protocol import keep, load, quartiles, show, turn_by_turn
from calib.capture.generated import sampled_text
from calib.kernels.huge_pages import empty_large
from calib.kernels.matching_pursuit.reference import (
    desparsify,
    gram_is_cheaper,
    matching_pursuit,
    orthogonal_matching_pursuit,
    pursuit_by_gram,
    pursuit_by_products,
)
from calib.neural_dict.centroids import centroids

RESULT = "pursuit_cpu.json"
MODEL = "artifacts/tiny-llama"
WIDTH, SPARSITY = 128, 8
CLOSE = 1e-3  # largest relative difference of mean errors, which near ties may cause

BATCHED, ORTHOGONAL = "matching pursuit", "orthogonal matching pursuit"
PEER = "scikit-learn"

# Pairs of steps: the first is divided by the second.
RATIOS = {
    "A/A": (f"{BATCHED} again", BATCHED),
    "loop (torch) / matching pursuit": ("loop (torch)", BATCHED),
    "loop (numpy) / matching pursuit": ("loop (numpy)", BATCHED),
    "loop with a Gram matrix (numpy) / matching pursuit": ("loop with a Gram matrix (numpy)", BATCHED),
    "scikit-learn / matching pursuit": (PEER, BATCHED),
    "scikit-learn / orthogonal matching pursuit": (PEER, ORTHOGONAL),
    "products / Gram": ("by products", "by Gram"),
}
PAGES = {"as it comes / large": ("as it comes", "large")}


def loop_torch(x: Tensor, atoms: Tensor) -> tuple[Tensor, Tensor]:
    """Runs matching pursuit one vector at a time: one product with the dictionary and one argmax per step."""
    index, coefficient = torch.empty(len(x), SPARSITY, dtype=torch.int64), torch.empty(len(x), SPARSITY)
    for row, vector in enumerate(x):
        residual = vector.clone()
        for step in range(SPARSITY):
            correlations = torch.mv(atoms, residual)
            position = int(correlations.abs().argmax())
            residual.sub_(correlations[position] * atoms[position])
            index[row, step], coefficient[row, step] = position, correlations[position]
    return index, coefficient


def loop_numpy(x: np.ndarray, atoms: np.ndarray, gram: bool = False) -> tuple[Tensor, Tensor]:
    """Runs the same in numpy; with `gram`, correlations are updated with rows of the Gram matrix."""
    index, coefficient = np.empty((len(x), SPARSITY), np.int64), np.empty((len(x), SPARSITY), np.float32)
    matrix = atoms @ atoms.T if gram else None
    for row, vector in enumerate(x):
        residual, correlations = vector.copy(), atoms @ vector
        for step in range(SPARSITY):
            position = np.abs(correlations).argmax()
            index[row, step], coefficient[row, step] = position, correlations[position]
            if matrix is not None:
                correlations = correlations - correlations[position] * matrix[position]
            elif step + 1 < SPARSITY:
                residual -= correlations[position] * atoms[position]
                correlations = atoms @ residual
    return torch.from_numpy(index), torch.from_numpy(coefficient)


def steps(x: Tensor, atoms: Tensor) -> dict[str, Callable[[], object]]:
    """Returns the timed steps, on the vectors `x`."""
    array, table = x.numpy(), atoms.numpy()
    columns, targets = np.asfortranarray(table.T), np.asfortranarray(array.T)
    return {
        BATCHED: lambda: matching_pursuit(x, atoms, SPARSITY),
        f"{BATCHED} again": lambda: matching_pursuit(x, atoms, SPARSITY),
        ORTHOGONAL: lambda: orthogonal_matching_pursuit(x, atoms, SPARSITY),
        "by Gram": lambda: pursuit_by_gram(x, atoms, SPARSITY),
        "by products": lambda: pursuit_by_products(x, atoms, SPARSITY),
        "loop (torch)": lambda: loop_torch(x, atoms),
        "loop (numpy)": lambda: loop_numpy(array, table),
        "loop with a Gram matrix (numpy)": lambda: loop_numpy(array, table, gram=True),
        PEER: lambda: orthogonal_mp(columns, targets, n_nonzero_coefs=SPARSITY),
    }


def mean_error(x: Tensor, restored: Tensor) -> float:
    """Returns the mean of |x - x^|^2 / |x|^2."""
    return float(((x - restored).square().sum(-1) / x.square().sum(-1)).mean())


def compare(x: Tensor, atoms: Tensor) -> dict[str, float]:
    """Returns the error of every step's result; exits if steps of the same pursuit have different errors."""
    errors = {}
    for name, step in steps(x, atoms).items():
        answer = step()
        restored = (
            torch.from_numpy(answer.T.astype(np.float32)) @ atoms
            if isinstance(answer, np.ndarray)
            else desparsify(*answer, atoms)  # type: ignore[call-arg]
        )
        errors[name] = mean_error(x, restored)
    for name, error in errors.items():
        expected = errors[ORTHOGONAL if name in (ORTHOGONAL, PEER) else BATCHED]
        if abs(error - expected) > CLOSE * expected:
            raise SystemExit(f"{name} errs by {error:.6f}, {expected:.6f} expected: not the same answer")
    return errors


def measure(vectors: int, count: int, turns: int) -> dict[str, object]:
    """Returns the milliseconds of every step, and the ratios."""
    draw = torch.Generator().manual_seed(0)
    atoms = normalize(torch.randn(count, WIDTH, generator=draw), dim=-1)
    errors = compare(torch.randn(min(vectors, 256), WIDTH, generator=draw), atoms)
    run = turn_by_turn(lambda _: steps(torch.randn(vectors, WIDTH, generator=draw), atoms), turns, RATIOS, warm=1)
    return {"mean_relative_error": errors, **run}


def pages(turns: int) -> list[dict[str, object]]:
    """Times a Gram matrix written to new memory of torch, and to that of `empty_large`; returns milliseconds and their ratio."""
    rows: list[dict[str, object]] = []
    for count in (2048, 4096, 8192):
        atoms = normalize(torch.randn(count, WIDTH), dim=-1)
        ways: dict[str, Callable[[], object]] = {
            "as it comes": lambda atoms=atoms: atoms @ atoms.mT,
            "large": lambda atoms=atoms: torch.mm(atoms, atoms.mT, out=empty_large(len(atoms), len(atoms), like=atoms)),
        }
        rows.append({"atoms": count, **turn_by_turn(lambda _, ways=ways: ways, turns, PAGES, warm=1)})
    return rows


def forms(vectors: int, turns: int) -> list[dict[str, object]]:
    """Times both forms for several numbers of atoms and widths; returns also which one `gram_is_cheaper` chooses."""
    rows: list[dict[str, object]] = []
    for width in (64, 128):
        for count in (512, 1024, 2048, 4096, 8192):
            x, atoms = torch.randn(vectors, width), normalize(torch.randn(count, width), dim=-1)
            seconds: dict[str, list[float]] = {"gram": [], "products": []}
            for turn in range(turns + 1):
                for name, form in (("gram", pursuit_by_gram), ("products", pursuit_by_products)):
                    start = time.perf_counter()
                    form(x, atoms, SPARSITY)
                    seconds[name] += [time.perf_counter() - start] if turn else []
            ratio = quartiles([b / a for a, b in zip(seconds["gram"], seconds["products"], strict=True)])
            taken = "gram" if gram_is_cheaper(vectors, count, width, SPARSITY) else "products"
            rows.append({"head_dim": width, "atoms": count, "products/gram": ratio, "taken": taken})
            rows[-1] |= {name: quartiles([1e3 * value for value in values]) for name, values in seconds.items()}
    return rows


def made_up() -> dict[str, tuple[Tensor, Tensor]]:
    """Returns vectors and atoms: normal ones, and ones in 64 clusters."""
    draw = torch.Generator().manual_seed(1)
    centres = 2 * torch.randn(64, 64, generator=draw)
    clusters = centres.repeat(40, 1) + torch.randn(2560, 64, generator=draw)
    data = {"normal": torch.randn(2560, 64, generator=draw), "clusters": clusters}
    return {name: (x[:2048], normalize(x[2048:], dim=-1)) for name, x in data.items()}


def of_the_model() -> dict[str, tuple[Tensor, Tensor]]:
    """Returns each layer's keys before RoPE and halves of values for sampled text, with 256 centroids per head of other vectors."""
    model = load(MODEL)
    config = model.config
    found: dict[str, list[Tensor]] = {}

    def keeper(name: str, width: int) -> Callable[..., None]:
        return lambda _module, _inputs, output: found.setdefault(name, []).append(output.reshape(-1, width))

    for number, layer in enumerate(model.model.layers):
        layer.self_attn.k_proj.register_forward_hook(keeper(f"keys.{number}", config.head_dim))
        layer.self_attn.v_proj.register_forward_hook(keeper(f"values.{number}", config.head_dim // 2))
    text = sampled_text(model, config.bos_token_id, 256, 48, seed=0)
    found.clear()
    model(text)
    data = {}
    for name, (vectors,) in found.items():
        known, heldout = vectors[: len(vectors) * 3 // 4], vectors[len(vectors) * 3 // 4 :]
        draw = torch.Generator().manual_seed(2)
        table = centroids(known, 256 * config.num_key_value_heads, draw).half().float()
        data[name] = heldout[torch.randperm(len(heldout), generator=draw)[:2048]], table
    return data


def errors() -> list[dict[str, object]]:
    """Returns the mean relative squared errors of both pursuits at 4, 8 and 16 pairs."""
    rows = []
    for name, (x, atoms) in {**made_up(), **of_the_model()}.items():
        for sparsity in (4, 8, 16):
            plain, refitted = (
                mean_error(x, desparsify(*pursuit(x, atoms, sparsity), atoms))
                for pursuit in (matching_pursuit, orthogonal_matching_pursuit)
            )
            row = {"data": name, "head_dim": x.shape[-1], "atoms": len(atoms), "sparsity": sparsity}
            rows.append({**row, "matching": plain, "orthogonal": refitted, "orthogonal/matching": refitted / plain})
    return rows


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vectors", type=int, default=2048)
    parser.add_argument("--atoms", type=int, default=4096)
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2, help="of torch and of numpy alike; 1 where others run beside")
    parser.add_argument("--write", action="store_true", help=f"keep the run in benchmarks/results/{RESULT}")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    threadpool_limits(asked.threads)  # numpy's and scikit-learn's
    torch.manual_seed(0)
    run = measure(asked.vectors, asked.atoms, asked.turns)
    show(run)
    room = pages(asked.turns)
    for row in room:
        print(row)
    table = forms(asked.vectors, asked.turns)
    for row in table:
        print(row)
    found = errors()
    for row in found:
        print(f"{row['data']:<10} s={row['sparsity']:<3} {row['matching']:.5f} {row['orthogonal']:.5f}", end="  ")
        print(f"{row['orthogonal/matching']:.3f}")
    if asked.write:
        sizes = {"vectors": asked.vectors, "atoms": asked.atoms, "head_dim": WIDTH, "sparsity": SPARSITY}
        keep(RESULT, {**sizes, "turns": asked.turns, **run, "pages": room, "forms": table, "errors": found})


if __name__ == "__main__":
    main()
