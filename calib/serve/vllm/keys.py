"""Keys of a request's chunks: a hash of everything that its keys and values up to a chunk's end depend on.

    key of chunk i = SHA-256 of (key of chunk i - 1, the chunk's token ids, what else of the request lies in the chunk)

The first is of the model as it is served. What else a request may have is as in vLLM's own prefix cache: pictures and sounds by
their hash and position, the LoRA adapter by name and path, the cache salt. A request with embeddings in place of tokens has no
keys.
"""

from typing import Any

from calib.runtime.files import canonical_json


class Keys:
    """The keys of one request, made as they are asked for.

    Args:
        request: vLLM's `Request`.
        model: what identifies the model and how it is served.
        chunk: tokens of a chunk.
    """

    def __init__(self, request: Any, model: str, chunk: int) -> None:
        self._request, self._chunk, self._found = request, chunk, list[str]()
        self._tokens = request.prompt_embeds is None
        adapter = request.lora_request
        self._root = _hashed(
            model,
            None if adapter is None else [adapter.lora_name, adapter.lora_path],
            request.cache_salt,
        )

    @property
    def whole(self) -> int:
        """Chunks that are full of tokens."""
        return len(self._request.all_token_ids) // self._chunk if self._tokens else 0

    def __getitem__(self, index: int) -> str:
        """Of a chunk below `whole`."""
        while len(self._found) <= index:
            start = len(self._found) * self._chunk
            end = start + self._chunk
            ids = [int(token) for token in self._request.all_token_ids[start:end]]
            inputs = [
                [one.identifier, one.mm_position.offset]
                for one in self._request.mm_features
                if one.mm_position.offset < end and one.mm_position.offset + one.mm_position.length > start
            ]
            self._found.append(_hashed(self._found[-1] if self._found else self._root, ids, inputs))
        return self._found[index]


def _hashed(*parts: Any) -> str:
    return canonical_json.sha256(parts)
