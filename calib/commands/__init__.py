"""One module per command, each with `run(argv) -> int`; imported only when its command is asked for."""
