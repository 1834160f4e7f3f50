"""The codec of `calib.runtime.storage` behind LMCache's stores (https://github.com/LMCache/LMCache, 0.5.x).

`plugin.py` is what an LMCache server imports; docs/serve/lmcache.md has the command lines. Of the other files `serde.py` alone
needs lmcache.
"""
