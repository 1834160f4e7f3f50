"""Runs one vLLM engine on a file of prompts and writes its answers, for `lmcache_reuse.py`, `vllm_reuse.py` and `vllm_fp8.py`.

    python -m benchmarks.vllm_engine MODEL ARGUMENTS PROMPTS.json ANSWERS.json

ARGUMENTS are vLLM's as JSON, with underscores, such as `{"kv_transfer_config": {...}, "max_num_seqs": 1}`. Unlike `vllm serve` this
needs no HTTP, and reports for every answer how many tokens of its prompt came from a cache. PROMPTS.json is a list of lists of ids,
ANSWERS.json is

    {"answers": [{"ids": [...], "cached": tokens}, ...], "scales": {layer: [of keys, of values]}}

The scales of the KV cache are those that the engine holds, lists of floats; only an engine in this process
(VLLM_ENABLE_V1_MULTIPROCESSING=0) shows them.
"""

import json
import sys
from pathlib import Path

from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig

NEW = 8  # tokens generated: a number of four digits, and some more


def main(model: str, arguments: str, prompts: str, answers: str) -> None:
    given = json.loads(arguments)
    transfer = given.pop("kv_transfer_config", None)
    engine = LLM(
        model=model,
        dtype="float16",  # the model's own
        max_model_len=2048,
        enforce_eager=True,
        seed=0,
        kv_transfer_config=None if transfer is None else KVTransferConfig(**transfer),
        **given,
    )
    greedy = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
    asked = [{"prompt_token_ids": ids} for ids in json.loads(Path(prompts).read_text())]
    outputs = engine.generate(asked, greedy, use_tqdm=False)
    found = [{"ids": list(one.outputs[0].token_ids), "cached": one.num_cached_tokens} for one in outputs]
    layers = engine.llm_engine.vllm_config.compilation_config.static_forward_context
    scales = {name: [own._k_scale.flatten().tolist(), own._v_scale.flatten().tolist()] for name, own in layers.items()}
    Path(answers).write_text(json.dumps({"answers": found, "scales": scales}))


if __name__ == "__main__":
    main(*sys.argv[1:])
