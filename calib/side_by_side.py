"""Runs pieces of work made of small operations in parallel, each in one thread, instead of one after another in all threads."""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

Piece = TypeVar("Piece")


def side_by_side(work: Callable[[Piece], object], pieces: Iterable[Piece], device: torch.device) -> None:
    """Calls `work` for each piece: one after another on a GPU; on a CPU several at once, each in one thread.

    For operations too small to gain from several threads. As each piece runs in one thread, the order of every sum, and so every
    bit of the result, does not depend on the number of threads.
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
