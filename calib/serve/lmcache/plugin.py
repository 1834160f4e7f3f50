"""What an LMCache server imports: an adapter of type "plugin" whose `module_path` is this module and `class_name` "FileAdapter".

Importing it registers the serde type "calib". LMCache has no entry point for serdes; the module of a plugin adapter is imported
before the serde is made.
"""

from lmcache.v1.distributed.internal_api import L1MemoryDesc
from lmcache.v1.distributed.l2_adapters.fs_l2_adapter import FSL2Adapter, FSL2AdapterConfig
from lmcache.v1.distributed.serde import AsyncSerdeProcessor, SerdeProcessor, register_serde_factory

from calib.serve.lmcache.options import Options
from calib.serve.lmcache.serde import CalibDeserializer, CalibSerializer, Chunks


class FileAdapter(FSL2Adapter):
    """LMCache's own adapter for files, as a plugin: `adapter_params` are the fields of `{"type": "fs", ...}`."""

    config_class_name = FSL2AdapterConfig.__name__  # which LMCache looks up in this module

    def __init__(self, config: FSL2AdapterConfig, l1_memory_desc: L1MemoryDesc | None = None) -> None:
        super().__init__(config)


def create(kwargs: dict[str, object]) -> SerdeProcessor:
    """The serde of an adapter's JSON. Raises ValueError and ArtifactError, so that a server with wrong options does not start."""
    options = Options.of(kwargs)
    chunks = Chunks(options)
    return AsyncSerdeProcessor(CalibSerializer(chunks), CalibDeserializer(chunks), max_workers=options.max_workers)


register_serde_factory("calib", create)
