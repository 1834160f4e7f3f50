"""The codec of `calib.runtime.storage` as a serde of LMCache's stores (https://github.com/LMCache/LMCache, 0.5.x).

An LMCache server imports `plugin.py`; docs/serve/lmcache.md has the command lines. Of the other files only `serde.py` needs
lmcache.
"""
