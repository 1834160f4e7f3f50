"""The child of `checked_program`: limits itself, runs one program, and writes the token behind its last line.

It reads {"program", "token", "limits"} from its input, is run by its path and imports nothing but the standard library.
"""

import json
import os
import sys


def main() -> None:
    """Ends with status 0 where the program came to its end."""
    asked = json.loads(sys.stdin.buffer.read())
    write, leave, report, token = os.write, os._exit, os.dup(1), asked["token"].encode()  # whatever becomes of `os`
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1):
        os.dup2(nothing, stream)
    limit(asked["limits"])
    exec(compile(asked["program"], "<program>", "exec"), {})
    write(report, token)
    leave(0)


def limit(limits: dict[str, int]) -> None:
    """Sets the limits that the platform has, by their names behind RLIMIT_; macOS refuses some of its own."""
    try:
        import resource
    except ImportError:  # Windows
        return
    for name, value in limits.items():
        kind = getattr(resource, f"RLIMIT_{name}", None)
        if kind is None:
            continue
        hard = resource.getrlimit(kind)[1]
        most = value if hard == resource.RLIM_INFINITY else min(value, hard)
        try:
            resource.setrlimit(kind, (most, most))
        except (ValueError, OSError):
            continue


if __name__ == "__main__":
    main()
