"""Runs one vLLM engine on a file of prompts and writes its answers, for `lmcache_reuse.py` and `vllm_reuse.py`.

    python -m benchmarks.vllm_engine MODEL ARGUMENTS PROMPTS.json ANSWERS.json

ARGUMENTS are vLLM's as JSON, with underscores, such as `{"kv_transfer_config": {...}, "max_num_seqs": 1}`. Unlike `vllm serve` this
needs no HTTP, and reports for every answer how many tokens of its prompt came from a cache. PROMPTS.json is a list of lists of ids,
ANSWERS.json a list of `{"ids": [...], "cached": tokens}`.
"""

import json
import sys
from pathlib import Path

from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig

NEW = 8  # tokens generated: a number of four digits, and some more


def main(model: str, arguments: str, prompts: str, answers: str) -> None:
    given = json.loads(arguments)
    transfer = KVTransferConfig(**given.pop("kv_transfer_config"))
    engine = LLM(
        model=model,
        dtype="float16",  # the model's own
        max_model_len=2048,
        enforce_eager=True,
        seed=0,
        kv_transfer_config=transfer,
        **given,
    )
    greedy = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
    asked = [{"prompt_token_ids": ids} for ids in json.loads(Path(prompts).read_text())]
    outputs = engine.generate(asked, greedy, use_tqdm=False)
    found = [{"ids": list(one.outputs[0].token_ids), "cached": one.num_cached_tokens} for one in outputs]
    Path(answers).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
