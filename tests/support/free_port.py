"""A free port for processes that start later."""

import random
import socket

# Below the ephemeral ports (from 32768 on Linux, from 49152 elsewhere), which the system may give to another test's connection
# before the process that shall listen has started.
PORTS = range(20000, 32000)


def free_port() -> int:
    """A random port of PORTS on which no process listens; raises OSError if none of 50 is free."""
    for port in random.SystemRandom().sample(PORTS, 50):  # tests with the same seed of `random` get different ports
        with socket.socket() as one:
            if one.connect_ex(("127.0.0.1", port)):
                return port
    raise OSError(f"of 50 ports in {PORTS.start} ... {PORTS.stop - 1} none is free")
