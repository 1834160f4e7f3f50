"""The provenance of an artifact as plain JSON, without folders, dates or the machine's name."""

from dataclasses import asdict
from importlib.metadata import version
from typing import Any

from calib import __version__
from calib.capture.corpus import Corpus
from calib.capture.model_files import model_name
from calib.fit.calibration import Calibration


def settings(calibration: Calibration, corpus: Corpus, seed: int, batch_size: int) -> dict[str, Any]:
    """Returns all settings that the statistics depend on: the same settings on the same machine give the same bytes."""
    return {
        "model": model_name(calibration.path),
        "dtype": calibration.dtype_name,
        "bits": list(calibration.bits),
        "clip_factors": list(calibration.clip_factors),
        "clip_sequences": calibration.limits["clip"],
        "klt": calibration.klt,
        "sensitivity_sequences": calibration.limits["sensitivity"] if calibration.klt or calibration.nuq else 0,
        # Recorded only if set, so that the bytes of other artifacts do not change.
        **({"storage": True} if calibration.storage else {}),
        **({"rotations": True} if calibration.rotations else {}),
        **({"nuq": list(calibration.nuq)} if calibration.nuq else {}),
        "query_rows": calibration.query_rows,
        "outlier_shares": list(calibration.outlier_shares),
        "residual_bits": list(calibration.residual_bits),
        "residual_rank": calibration.residual_rank,
        "residual_forms": {stream: list(names) for stream, names in calibration.residual_forms.items()},
        # Without dictionaries their training options have no effect.
        "dictionary": asdict(calibration.dictionary) if calibration.dictionary.atoms else {"atoms": 0},
        "batch_size": batch_size,
        "seed": seed,
        "data": corpus.origin,
    }


def versions() -> dict[str, str]:
    """Returns the versions of the packages that the statistics depend on."""
    return {"calib": __version__} | {name: version(name) for name in ("torch", "transformers", "lightning")}


def provenance(config: dict[str, Any], metrics: dict[str, Any]) -> dict[str, Any]:
    """Returns the artifact's `provenance`: data, seed, versions, metrics, config."""
    rest = {key: value for key, value in config.items() if key not in ("data", "seed")}
    return {
        "data": config["data"],
        "seed": config["seed"],
        "versions": versions(),
        "metrics": metrics,
        "config": rest,
    }
