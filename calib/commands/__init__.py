"""One module per command, each with `run(argv) -> int`; a module is imported only when its command runs."""
