"""The codec of `calib.runtime.storage` behind SGLang's hierarchical cache (https://github.com/sgl-project/sglang, 0.5.x).

`backend.py` is what SGLang imports; docs/serve/sglang.md has the command line. `pages.py` and `options.py` need torch alone.
"""
