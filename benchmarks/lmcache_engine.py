"""One vLLM engine behind an LMCache server: prompts in, answers out, for `lmcache_reuse.py`.

    python benchmarks/lmcache_engine.py MODEL PORT PROMPTS.json ANSWERS.json

`vllm serve` would do as well; this asks without HTTP, and tells of every answer how many tokens of its prompt came from a cache.
PROMPTS.json is a list of lists of ids, ANSWERS.json a list of `{"ids": [...], "cached": tokens}`.
"""

import json
import sys
from pathlib import Path

from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig

NEW = 8  # tokens: a number of four digits, and what follows


def main(model: str, port: str, prompts: str, answers: str) -> None:
    engine = LLM(
        model=model,
        dtype="float16",  # the model's own
        max_model_len=2048,
        max_num_seqs=1,
        enforce_eager=True,
        seed=0,
        kv_transfer_config=KVTransferConfig(
            kv_connector="LMCacheMPConnector",
            kv_role="kv_both",
            kv_connector_extra_config={"lmcache.mp.port": int(port)},
        ),
    )
    greedy, found = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True), []
    for ids in json.loads(Path(prompts).read_text()):
        (output,) = engine.generate({"prompt_token_ids": ids}, greedy, use_tqdm=False)
        found.append({"ids": list(output.outputs[0].token_ids), "cached": output.num_cached_tokens})
    Path(answers).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
