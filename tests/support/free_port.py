"""A port for processes that are still to start."""

import random
import socket

# Below what systems give to connections by themselves (from 32768 on Linux, from 49152 elsewhere): a port from there can be in
# another test's hands seconds later, when the process that is to listen has been started.
PORTS = range(20000, 32000)


def free_port() -> int:
    """One on which nobody listens."""
    for port in random.SystemRandom().sample(PORTS, 50):  # tests that seed `random` alike must not meet
        with socket.socket() as one:
            if one.connect_ex(("127.0.0.1", port)):
                return port
    raise OSError(f"of 50 ports in {PORTS.start} ... {PORTS.stop - 1} none is free")
