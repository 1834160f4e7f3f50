"""A KV connector for vLLM (https://github.com/vllm-project/vllm, 0.32): prefixes as files of `klt`'s codes.

`connector.py` is what vLLM imports; docs/serve/vllm.md has the command line. Of the other files `keys.py`,
`options.py` and `paged_memory.py` need torch alone.
"""
