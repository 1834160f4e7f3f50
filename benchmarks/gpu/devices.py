"""Figures of GPUs from their data sheets, on which predictions are based."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """A GPU.

    Args:
        capability: compute capability times ten.
        multiprocessors: SMs.
        hertz: boost clock.
        bytes_per_second: peak rate of its memory.
        source: of these figures.
    """

    name: str
    capability: int
    multiprocessors: int
    hertz: float
    bytes_per_second: float
    source: str

    def copied(self, seconds: float) -> float:
        """Returns the bytes that a copy moves in `seconds`."""
        return COPY * self.bytes_per_second * seconds


# Share of the peak that a large copy reaches: 4.3 of 4.8 TB/s on the H200 of the targets. Assumed for all three GPUs.
COPY = 0.9

# Least and most seconds that a node of a CUDA graph costs, and the number of nodes of the baseline: attention and its merge.
NODE, BASELINE_NODES = (2e-6, 2.5e-6), 2

DEVICES = {
    one.name: one
    for one in (
        Device("A100", 80, 108, 1.41e9, 2.039e12, "NVIDIA A100 80GB SXM data sheet"),
        Device("H100", 90, 132, 1.98e9, 3.35e12, "NVIDIA H100 SXM data sheet"),
        Device("H200", 90, 132, 1.98e9, 4.8e12, "NVIDIA H200 SXM data sheet"),
    )
}
