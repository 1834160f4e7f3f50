"""Work on a second stream of a device, so that copies and computation overlap; on a CPU it is done at once."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class SideStream:
    """A stream beside the main one. Read what it changes only after `wait`, and do not change what it reads before."""

    _streams: "dict[torch.device, torch.cuda.Stream]" = {}

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._done: torch.cuda.Event | None = None

    @classmethod
    def of(cls, device: torch.device) -> "torch.cuda.Stream | None":
        """The side stream of `device`; None where nothing was ever done on it."""
        return cls._streams.get(device)

    @contextmanager
    def work(self, *used: Tensor) -> Iterator[None]:
        """Within the context, work is queued on the side stream, after everything that is on the main stream now. `used`
        tensors may be freed by their owner before the work is done."""
        if self.device.type != "cuda":
            yield
            return
        if self.device not in self._streams:
            self._streams[self.device] = torch.cuda.Stream(self.device)
        stream = self._streams[self.device]
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            try:
                yield
            finally:  # also if it fails: what is queued already still uses them
                for tensor in used:
                    tensor.record_stream(stream)
                self._done = torch.cuda.Event()
                self._done.record(stream)

    def wait(self) -> None:
        """Makes the main stream wait until the work so far is done; the host does not wait."""
        if self._done is not None:
            torch.cuda.current_stream(self.device).wait_event(self._done)
            self._done = None

    def __deepcopy__(self, memo: dict[int, object]) -> "SideStream":
        """A copy starts without pending work: the original's is awaited."""
        self.wait()
        return SideStream(self.device)
