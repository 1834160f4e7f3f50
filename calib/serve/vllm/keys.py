"""Names of a request's chunks: each is a hash of everything that the KV cache up to the chunk's end depends on.

    key of chunk i = SHA-256 of (key of chunk i - 1, the chunk's token ids, the request's multimodal inputs in the chunk)

The key before the first chunk is a hash of the served model, the LoRA adapter (name and path) and the cache salt. As in vLLM's own
prefix cache, images and audio are identified by their hash and position. A request with prompt embeddings instead of tokens has no
keys.
"""

from typing import Any

from calib.runtime.files import canonical_json


class Keys:
    """The keys of one request, computed when needed.

    Args:
        request: vLLM's `Request`.
        model: hash of the model and how it is served (`identity_of`).
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
        """Number of chunks that are full of known tokens."""
        return len(self._request.all_token_ids) // self._chunk if self._tokens else 0

    def __getitem__(self, index: int) -> str:
        """Returns the key of chunk `index`, which is below `whole`."""
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
