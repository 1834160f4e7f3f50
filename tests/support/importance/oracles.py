"""The oracle of every importance method by name."""

from importance.budget import H2O, MiKV
from importance.chunks import ZipCache
from importance.last_query import Tova
from importance.positions import StreamingLLM, TopK
from importance.prompt_votes import SnapKV

ORACLES = {
    "zipcache": ZipCache,
    "mikv": MiKV,
    "h2o": H2O,
    "tova": Tova,
    "snapkv": SnapKV,
    "streaming_llm": StreamingLLM,
    "oracle": TopK,
}
