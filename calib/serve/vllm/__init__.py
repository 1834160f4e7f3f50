"""A KV connector for vLLM (https://github.com/vllm-project/vllm, 0.32 and 0.33) that stores prefixes as files of `klt`'s codes.

vLLM imports `connector.py`; docs/serve/vllm.md has the command line. Of the other files `keys.py`, `options.py` and
`paged_memory.py` need torch only.
"""
