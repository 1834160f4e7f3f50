"""Work of many small operations: several pieces at once, each in one thread, instead of one after another in all threads."""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

Piece = TypeVar("Piece")


def side_by_side(work: Callable[[Piece], object], pieces: Iterable[Piece], device: torch.device) -> None:
    """Does `work` for each piece: one after another on a GPU; on a CPU several at once, each in one thread.

    For operations that are too small for several threads to share. With one thread the order of every sum, hence every bit of a
    result, is the same whatever the number of threads.
    """
    if device.type != "cpu":
        for piece in pieces:
            work(piece)
        return
    threads = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            list(pool.map(work, pieces))
    finally:
        torch.set_num_threads(threads)
