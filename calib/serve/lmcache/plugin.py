"""The module that an LMCache server imports for an adapter of type "plugin" with this module as `module_path`, and "FileAdapter"
as `class_name`.

Importing it registers the serde type "calib". LMCache has no entry point for serdes, but it imports the module of a plugin adapter
before it makes the serde.
"""

from lmcache.v1.distributed.internal_api import L1MemoryDesc
from lmcache.v1.distributed.l2_adapters.fs_l2_adapter import FSL2Adapter, FSL2AdapterConfig
from lmcache.v1.distributed.serde import AsyncSerdeProcessor, SerdeProcessor, register_serde_factory

from calib.serve.lmcache.options import Options
from calib.serve.lmcache.serde import CalibDeserializer, CalibSerializer, Chunks


class FileAdapter(FSL2Adapter):
    """LMCache's own adapter for files, as a plugin: `adapter_params` are the fields of `{"type": "fs", ...}`."""

    config_class_name = FSL2AdapterConfig.__name__  # LMCache looks up this name in the module

    def __init__(self, config: FSL2AdapterConfig, l1_memory_desc: L1MemoryDesc | None = None) -> None:
        super().__init__(config)


def create(kwargs: dict[str, object]) -> SerdeProcessor:
    """Makes the serde from an adapter's JSON. Raises ValueError or ArtifactError for wrong options: the server does not start."""
    options = Options.of(kwargs)
    chunks = Chunks(options)
    return AsyncSerdeProcessor(CalibSerializer(chunks), CalibDeserializer(chunks), max_workers=options.max_workers)


register_serde_factory("calib", create)
