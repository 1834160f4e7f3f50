"""GPUs as their data sheets describe them: the numbers that predictions start from."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """A GPU.

    Args:
        capability: compute capability times ten.
        multiprocessors: SMs.
        hertz: boost clock.
        bytes_per_second: of its memory, at the peak.
        source: where these stand.
    """

    name: str
    capability: int
    multiprocessors: int
    hertz: float
    bytes_per_second: float
    source: str

    def copied(self, seconds: float) -> float:
        """Bytes that a copy moves in so long."""
        return COPY * self.bytes_per_second * seconds


# What a large copy reaches of the peak: 4.3 of the 4.8 TB/s of the H200 that the targets were set for. Assumed of all three.
COPY = 0.9

# Seconds that a node of a CUDA graph costs, at least and at most, and how many the baseline has: attention and its merge.
NODE, BASELINE_NODES = (2e-6, 2.5e-6), 2

DEVICES = {
    one.name: one
    for one in (
        Device("A100", 80, 108, 1.41e9, 2.039e12, "NVIDIA A100 80GB SXM data sheet"),
        Device("H100", 90, 132, 1.98e9, 3.35e12, "NVIDIA H100 SXM data sheet"),
        Device("H200", 90, 132, 1.98e9, 4.8e12, "NVIDIA H200 SXM data sheet"),
    )
}
