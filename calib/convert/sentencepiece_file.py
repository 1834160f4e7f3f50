"""Reads a SentencePiece model file, if its byte pair encoding can be rebuilt as a tokenizer of transformers."""

from pathlib import Path
from typing import Any

from calib.errors import UsageError


def read_model(path: Path) -> Any:
    """Returns the file's `ModelProto`: pieces with scores and types, and the settings of trainer and normaliser.

    Raises UsageError if sentencepiece is missing, or the file is no SentencePiece model, no byte pair encoding, or maps
    characters to others.
    """
    try:
        from google.protobuf.message import DecodeError
        from sentencepiece import sentencepiece_model_pb2 as proto
    except ImportError as error:
        raise UsageError("reading 'tokenizer.model' needs sentencepiece: pip install 'calib-kv[convert]'") from error
    except Exception as error:  # protobuf's VersionError, a type that releases before 5.26 do not have
        line = " ".join(str(error).split())
        raise UsageError(f"sentencepiece needs a newer protobuf ({line}); pip install --upgrade protobuf") from error
    try:
        model = proto.ModelProto.FromString(path.read_bytes())
    except OSError as error:
        raise UsageError(f"cannot read '{path}' ({error.strerror}); give the whole checkpoint") from error
    except DecodeError as error:
        raise UsageError(f"'{path}' is no SentencePiece model ({error}); download it again") from error
    if not model.pieces:
        raise UsageError(f"'{path}' has no pieces; download it again")
    if model.trainer_spec.model_type != proto.TrainerSpec.BPE or model.normalizer_spec.precompiled_charsmap:
        raise UsageError(
            f"'{path}' is no byte pair encoding, or normalises characters (precompiled_charsmap), which cannot be rebuilt; give "
            "the tokenizer.model of Baichuan2"
        )
    return model
