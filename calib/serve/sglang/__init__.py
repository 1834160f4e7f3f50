"""A storage backend of SGLang's hierarchical cache with `calib.runtime.storage` (https://github.com/sgl-project/sglang, 0.5.x).

SGLang imports `backend.py`; docs/serve/sglang.md has the command line. `pages.py` and `options.py` need torch only.
"""
