"""A connector called as by vLLM, with a model whose keys and values a test gives, in vLLM's memory layout for x86 processors."""

from itertools import product
from types import SimpleNamespace

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm_calls import Engine, Request

from calib.runtime import Codec
from calib.serve.vllm import connector as module
from calib.serve.vllm.connector import CalibConnector
from calib.serve.vllm.scheduler_side import file_key

LAYERS, HEADS, D, BLOCK, CHUNK, BLOCKS, BITS = 2, 2, 32, 32, 64, 24, 3
NAMES = [f"model.layers.{layer}.self_attn.attn" for layer in range(LAYERS)]
SPEC = {"block_size": BLOCK, "num_kv_heads": HEADS, "head_size": D, "dtype": torch.float16}


def groups(spec=None):
    return SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec or FullAttentionSpec(**SPEC))])


def config(path, folder, ranks=1, model=None, parallel=None, transfer=None, **fields):
    own = {"artifact": path, "folder": str(folder), "bits": BITS, "chunk": CHUNK, **fields}
    transfer = {"kv_role": "kv_both", "kv_load_failure_policy": "recompute", **(transfer or {})}
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(
            kv_connector_extra_config={name: value for name, value in own.items() if value is not None},
            is_kv_producer=transfer["kv_role"] != "kv_consumer",
            is_kv_consumer=transfer["kv_role"] != "kv_producer",
            **transfer,
        ),
        parallel_config=SimpleNamespace(
            **{
                "tensor_parallel_size": ranks,
                "pipeline_parallel_size": 1,
                "prefill_context_parallel_size": 1,
                "decode_context_parallel_size": 1,
                **(parallel or {}),
            }
        ),
        model_config=SimpleNamespace(
            **{
                "model": "my-llama",
                "revision": None,
                "dtype": torch.float16,
                "quantization": None,
                "hf_text_config": SimpleNamespace(rope_parameters={"rope_theta": 10000.0}),
                "use_mla": False,
                "uses_mrope": False,
                "get_num_layers": lambda parallel: LAYERS,
                "get_total_num_kv_heads": lambda: HEADS,
                "get_head_size": lambda: D,
                **(model or {}),
            }
        ),
        compilation_config=SimpleNamespace(static_forward_context={name: SimpleNamespace(isa="vec") for name in NAMES}),
    )


class Serving:
    """An engine and its memory; the keys and values of a request's tokens are those in `texts`, by request id."""

    def __init__(self, monkeypatch, path, folder, texts, ranks=1, **fields):
        self.texts, self.heads, self.computed = texts, max(1, HEADS // ranks), []
        self.memory = [
            {name: torch.full([BLOCKS, self.heads, BLOCK, 2 * D], 7.0, dtype=torch.float16) for name in NAMES}
            for _ in range(ranks)
        ]
        own = config(path, folder, ranks, **fields)
        connectors = [CalibConnector(own, KVConnectorRole.SCHEDULER, groups())]
        for rank in range(ranks):
            connectors.append(CalibConnector(own, KVConnectorRole.WORKER, groups()))
            monkeypatch.setattr(module, "get_tensor_model_parallel_rank", lambda rank=rank: rank)
            connectors[-1].register_kv_caches(self.memory[rank])
        assert all(isinstance(one, KVConnectorBase_V1) and not one.requires_kv_delivery for one in connectors)
        self.engine = Engine(connectors, self.compute, BLOCK, BLOCKS)

    def entry(self, rank, layer, head, block, offset):
        """Views of a token's key and value in a block, in the layout for x86 processors."""
        keys, values = self.memory[rank][NAMES[layer]][block, head].view(2, -1)
        return keys.view(D, BLOCK)[:, offset], values.view(BLOCK, D)[offset]

    def compute(self, rank, request, first, last, blocks):
        self.computed.append((request.request_id, first, last))
        rows = self.texts[request.request_id].unflatten(-1, (HEADS, D))
        for at, layer, head in product(range(first, min(last, rows.shape[2])), range(LAYERS), range(self.heads)):
            keys, values = self.entry(rank, layer, head, blocks[at // BLOCK], at % BLOCK)
            keys[:], values[:] = rows[:, layer, at, rank * HEADS // len(self.memory) + head]

    def held(self, rank, blocks):
        """The keys and values in these blocks, `[2, layers, tokens, heads, D]`."""
        found = torch.empty(2, LAYERS, len(blocks) * BLOCK, self.heads, D, dtype=torch.float16)
        for at, layer, head in product(range(found.shape[2]), range(LAYERS), range(self.heads)):
            found[0, layer, at, head], found[1, layer, at, head] = self.entry(
                rank, layer, head, blocks[at // BLOCK], at % BLOCK
            )
        return found


def wanted(artifact, text, chunks):
    """These chunks of `text`, encoded and decoded by the codec: `[2, layers, tokens, heads, D]`."""
    codec = Codec.from_artifact(artifact, bits=BITS)
    parts = [text[:, :, at * CHUNK : (at + 1) * CHUNK] for at in chunks]
    decoded = [codec.decode(codec.encode(part, at * CHUNK)) for at, part in zip(chunks, parts, strict=True)]
    return torch.cat(decoded, 2).unflatten(-1, (HEADS, D))


def request(text, name="one", **fields):
    """A request with as many token ids as `text` has tokens."""
    return Request(name, list(range(1000, 1000 + text.shape[2])), **fields)


def filled(one, text, pieces=None):
    """Compute the text from nothing in steps of `pieces` tokens, and close the engine, which stores it; return the request."""
    own = request(text)
    assert one.engine.begin(own) == 0
    one.engine.run(own, pieces or [text.shape[2]])
    one.engine.close()
    return own


def file_of(one, request, index):
    """The file in which an engine of one rank stores chunk `index` of a request."""
    scheduler = one.engine.scheduler
    key = scheduler._scheduler.follow(request).keys[index]
    return scheduler._folder._path(file_key(key, range(HEADS)))
