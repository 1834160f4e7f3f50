"""The artifact: what `calib fit` measured about one model's keys and values, in one file.

    artifact = Artifact.load("artifacts/tiny-llama.calib.safetensors")     # from_pretrained also takes folders and hub names
    artifact.check(model)                                  # raises ArtifactError for another model
    low = artifact.tensor("keys.low", wanted_by="kivi")    # [layers, kv_heads, head_dim], float32

The file is specified in `docs/artifact_format.md`; `file.py` encodes and decodes it, `tensor_registry.py` has the names of its
tensors, and `hub/` uploads it to the Hugging Face hub and downloads it.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from calib.runtime.artifact import file as artifact_file
from calib.runtime.artifact.fingerprint import check_fields, compare, fingerprint
from calib.runtime.artifact.tensor_registry import STREAMS, calibrator_of, check_registered, clip_form, option_of
from calib.runtime.files.atomic_file import write_atomically
from calib.runtime.files.canonical_json import plain
from calib.runtime.hub.client import Token
from calib.runtime.hub.find import find
from calib.runtime.hub.push import push
from calib.runtime.hub.save import save
from calib.runtime.messages.artifact_error import FIT_AGAIN, ArtifactError
from calib.runtime.messages.dtype_name import dtype_name
from calib.runtime.messages.printable import printable, shortened

if TYPE_CHECKING:
    from huggingface_hub import CommitInfo
    from transformers import PreTrainedModel

__all__ = ["Artifact", "ArtifactError"]

LISTED = 8  # names in a message
LONGEST = 120  # characters of a list in a message


@dataclass(frozen=True, eq=False)
class Artifact:
    """Calibration results of one model. Construction checks everything, so every `Artifact` object is valid.

    Attributes:
        tensors: by name, on the CPU: any of the registry's names (`docs/artifact_format.md`), and others. They are copies.
        fingerprint: the model that it was fitted on, as `fingerprint(model)` returns it.
        provenance: how it was measured, as plain JSON: data, seed, versions, metrics, configuration.
        clip_bits: the bit widths along the last axis of every clip tensor, such as (1, 2, 3, 4).

    Raises:
        ArtifactError: for NaN or infinities, for values that JSON cannot hold, and for a registered tensor with a shape, dtype
            or values that the registry does not allow.
    """

    tensors: Mapping[str, Tensor]
    fingerprint: Mapping[str, Any]
    provenance: Mapping[str, Any]
    clip_bits: Sequence[int] = ()

    def __post_init__(self) -> None:
        for name, tensor in self.tensors.items():
            check_tensor(name, tensor)
        copies = {name: self.tensors[name].detach().cpu().contiguous().clone() for name in sorted(self.tensors)}
        object.__setattr__(self, "tensors", copies)
        object.__setattr__(self, "fingerprint", plain(self.fingerprint, "fingerprint"))
        object.__setattr__(self, "provenance", plain(self.provenance, "provenance"))
        object.__setattr__(self, "clip_bits", check_clip_bits(self.clip_bits))
        check_fields(self.fingerprint)
        found = self.fingerprint
        check_registered(copies, found["layers"], found["kv_heads"], found["head_dim"], self.clip_bits)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Artifact":
        """Reads the file at `path` and checks all of it; raises `ArtifactError`, whose message begins with the path."""
        if not isinstance(path, str | os.PathLike):
            raise ArtifactError(f"got {printable(path)}, expected the path of an artifact; `calib fit` writes one")
        try:
            if os.path.exists(path) and not os.path.isfile(path):
                kind = "a folder" if os.path.isdir(path) else "not a regular file"
                raise ArtifactError(f"found {kind}, expected an artifact; name the .safetensors file itself")
            with Path(path).open("rb") as file:
                tensors, document = artifact_file.decode(file, os.fstat(file.fileno()).st_size)
            return cls(tensors, **document)
        except FileNotFoundError as error:
            raise ArtifactError(f"{path}: no such file, expected an artifact; `calib fit` writes one") from error
        except OSError as error:
            raise ArtifactError(
                f"{path}: cannot be read ({error.strerror}), expected an artifact; check its permissions"
            ) from error
        except ValueError as error:  # ArtifactError, and the ValueError of a path with a zero byte
            raise ArtifactError(f"{path}: {error}") from error

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the file under a temporary name and renames it: if the process is killed, the old file or none is left.

        Equal content gives equal bytes. Raises `ArtifactError` if the file cannot be written.
        """
        try:
            write_atomically(path, self.encoded())
        except OSError as error:
            raise ArtifactError(
                f"{path}: cannot be written ({error.strerror}); choose a folder with room and write permission"
            ) from error

    def encoded(self) -> bytes:
        """The file's bytes."""
        document = {"fingerprint": self.fingerprint, "provenance": self.provenance, "clip_bits": list(self.clip_bits)}
        return artifact_file.encode(self.tensors, document)

    @classmethod
    def from_pretrained(
        cls,
        name: str | os.PathLike[str],
        *,
        filename: str | None = None,
        revision: str | None = None,
        cache_dir: str | Path | None = None,
        force_download: bool = False,
        local_files_only: bool = False,
        token: Token = None,
    ) -> "Artifact":
        """Loads a file, the artifact in a folder, or the one in a repository of the hub (`owner/name`).

        A path that exists locally is used, without a request to the hub. A download is kept in the hub's cache and used
        again, also without a network (HF_HUB_OFFLINE=1). Raises `ArtifactError`, whose message never holds a token.

        Args:
            name: path of the file or folder, or name of the repository.
            filename: which file of the folder or repository; without it `calib.safetensors`, or the only
                `NAME.calib.safetensors`.
            revision: branch, tag or whole commit hash of the repository; without it `main`.
            cache_dir: folder to use instead of the hub's cache.
            force_download: download again what the cache has.
            local_files_only: use the cache alone.
            token: for private and gated repositories, instead of the one of `hf auth login`.
        """
        return cls.load(
            find(
                name,
                filename=filename,
                revision=revision,
                cache_dir=cache_dir,
                force_download=force_download,
                local_files_only=local_files_only,
                token=token,
            )
        )

    def save_pretrained(
        self,
        folder: str | os.PathLike[str],
        *,
        license: str | None = None,
        base_model: str | None = None,
        push_to_hub: bool = False,
        repo_id: str | None = None,
        **options: Any,
    ) -> None:
        """Writes `calib.safetensors` and its card README.md into `folder`, which is created if it is missing.

        A README.md that is not calib's (a model's own) stays. Raises `ArtifactError`.

        Args:
            folder: path of the folder.
            license: license of the artifact, for the card; named there only if given here.
            base_model: hub name of the model, for the card; without it the name that the model was loaded by in the fit, if that
                was a hub name.
            push_to_hub: whether to push it as well, with `options` of `push_to_hub`.
            repo_id: the repository to push to, which the card also tells readers to load; without it the folder's name.
        """
        if options and not push_to_hub:
            raise ArtifactError(
                f"got {', '.join(options)} without push_to_hub=True; pass push_to_hub=True as well, or leave it out"
            )
        name = repo_id or (Path(folder).resolve().name if push_to_hub else "path/to/this/folder")
        save(self, folder, name, license, base_model)
        if push_to_hub:
            self.push_to_hub(name, license=license, base_model=base_model, **options)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        private: bool | None = None,
        token: Token = None,
        revision: str | None = None,
        commit_message: str = "Upload calib artifact",
        create_pr: bool = False,
        license: str | None = None,
        base_model: str | None = None,
    ) -> "CommitInfo":
        """Uploads `calib.safetensors` and its card as one commit, and returns the hub's information on it.

        The repository and the branch are created if they are missing. A README.md there that is not calib's stays. Raises
        `ArtifactError`, whose message never holds a token.

        Args:
            repo_id: `owner/name`, or `name` for a repository of the user's own.
            private: whether a repository that is created here is private; None: the owner's default.
            token: a token that may write, instead of that of `hf auth login`.
            revision: the branch; without it `main`.
            commit_message: the first line of the commit.
            create_pr: whether to open a pull request instead of committing.
            license: as in `save_pretrained`.
            base_model: as in `save_pretrained`.
        """
        return push(
            self,
            repo_id,
            private=private,
            token=token,
            revision=revision,
            commit_message=commit_message,
            create_pr=create_pr,
            license=license,
            base_model=base_model,
        )

    def check(self, model: "PreTrainedModel", allow_finetuned: bool = False) -> None:
        """Raises `ArtifactError` naming the first field in which `model` differs from the one that this was fitted on.

        Args:
            model: the model that the artifact is to be used with.
            allow_finetuned: accept other weights of the same configuration (a chat version of a base model).
        """
        compare(self.fingerprint, fingerprint(model), allow_finetuned)

    def has(self, name: str) -> bool:
        """Whether the artifact has a tensor `name`."""
        return name in self.tensors

    def tensor(self, name: str, wanted_by: str = "") -> Tensor:
        """Returns tensor `name`; raises `ArtifactError` if it is missing, naming the method `wanted_by` and its calibrator."""
        if name in self.tensors:
            return self.tensors[name]
        shown = printable(name)
        who = f"method {wanted_by!r} needs tensor {shown}, which" if wanted_by else f"tensor {shown}"
        source = calibrator_of(name)
        measured_by = f"the calibrator {source!r}" if source else "no calibrator"
        fit = " ".join(["calib fit", option_of(name)]).rstrip()
        there = shortened(", ".join(list(self.tensors)[:LISTED]), LONGEST) or "no tensor"
        if len(self.tensors) > LISTED:
            there += f" and {len(self.tensors) - LISTED} more"
        raise ArtifactError(f"{who} is not in this artifact; {measured_by} of `{fit}` measures it; it holds {there}")

    def clip(self, stream: str, form: str, bits: int) -> Tensor:
        """Returns the clip factors `[layers, kv_heads]`, float32 in (0, 1], of one stream, group geometry and bit width.

        stream: `keys` or `values`. form: `32x1`, `1x32`, `1x*`, `fixed`, `scaled.1x32`, ... Raises `ArtifactError`.
        """
        if stream not in STREAMS:
            raise ArtifactError(f"no clip factors for stream {printable(stream)}, expected one of {', '.join(STREAMS)}")
        tensor = self.tensors.get(f"{stream}.clip.{form}")
        if tensor is None or bits not in self.clip_bits:
            named = [clip_form(name) for name in self.tensors]
            forms = shortened(", ".join(found[1] for found in named if found and found[0] == stream), LONGEST) or "none"
            widths = ", ".join(map(str, self.clip_bits)) or "no"
            raise ArtifactError(
                f"no clip factors for {stream} in form {printable(form)} at {printable(bits)} bits; this artifact has the forms "
                f"{forms} at {widths} bits; the calibrator 'clip' of `calib fit` measures them"
            )
        return tensor[:, :, list(self.clip_bits).index(bits)]


def check_tensor(name: str, tensor: Tensor) -> None:
    """Raises `ArtifactError` unless a tensor, registered or not, has a valid name, a storable dtype and shape, and finite
    values."""
    artifact_file.check_name(name)
    if tensor.dtype not in artifact_file.DTYPES or tensor.dim() > artifact_file.MOST_AXES:
        known = ", ".join(map(dtype_name, artifact_file.DTYPES))
        raise ArtifactError(
            f"tensor {printable(name)} is {tensor.dtype} with {tensor.dim()} axes, expected one of {known} with at most "
            f"{artifact_file.MOST_AXES}; convert it"
        )
    if not bool(torch.isfinite(tensor).all()):
        bad = int((~torch.isfinite(tensor)).sum())
        raise ArtifactError(
            f"tensor {printable(name)} has {bad} NaN or infinite entries of {tensor.numel()}, expected none; {FIT_AGAIN}"
        )


def check_clip_bits(bits: Sequence[int]) -> tuple[int, ...]:
    """Returns `bits` as a tuple; raises `ArtifactError` unless they are increasing widths from 1 to 16."""
    good = all(type(width) is int and 1 <= width <= 16 for width in bits) and list(bits) == sorted(set(bits))
    if not good:
        raise ArtifactError(
            f"clip_bits is {printable(list(bits))}, expected increasing whole numbers from 1 to 16; {FIT_AGAIN}"
        )
    return tuple(bits)
