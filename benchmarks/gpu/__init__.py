"""`make gpu`: on a machine with an NVIDIA GPU, runs every test that needs one, then measures every speed target, as one table.

python -m benchmarks.gpu [--only NAME ...] [--no-tests | --tests PATH ...] [--list]

targets         the targets, as rows of data, and the list of measurements with the seconds of each
turns, graphs   timing: interleaved turns in one process, medians of paired ratios, an A/A pair; launches replayed from a CUDA graph
inputs, layers  inputs: random keys with outlier channels, queries with peaked attention, many caches in rotation
agreement       checks before timing that a result agrees with the reference's
worker          measures in a separate process, so that a kernel that crashes does not stop the other measurements
report          the table, and one JSON file for a run
"""
