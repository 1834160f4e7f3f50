"""The child of `checked_program`: limits itself, runs one program, and then writes the token that marks the program's end.

It reads {"program", "token", "limits"} as JSON from its standard input, is started by its path and imports the standard library
only.
"""

import json
import os
import sys


def main() -> None:
    """Runs the program; exit with status 0 if it reached its end."""
    asked = json.loads(sys.stdin.buffer.read())
    write, leave, report, token = os.write, os._exit, os.dup(1), asked["token"].encode()  # the program may change `os`
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1):
        os.dup2(nothing, stream)
    limit(asked["limits"])
    exec(compile(asked["program"], "<program>", "exec"), {})
    write(report, token)
    leave(0)


def limit(limits: dict[str, int]) -> None:
    """Sets the limits that the platform has; keys are names without RLIMIT_. macOS refuses some, which are skipped."""
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
