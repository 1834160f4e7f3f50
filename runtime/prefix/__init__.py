"""A compressed prompt in a file: saved from a cache, and read back into one."""
