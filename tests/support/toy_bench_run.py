"""A made-up document of `calib bench` with every kind of row."""

from copy import deepcopy

CONTEXTS, BATCHES = [256, 1024, 4096], [1, 8]
NAMES = ["full", "rtn-4", "kivi-2", "<b>zip</b>|cache with a long name"]
KINDS = ("prefill", "first_token", "decode")


def made_up():
    """A document with every kind of row: failed, out of memory, a repeated baseline, a peer without a predicted size."""
    cells = []
    for batch in BATCHES:
        for context in CONTEXTS:
            for position, name in enumerate([*NAMES, "full again"]):
                cells.append(row(name, batch, context, 1.0 + position % 4))
    cells[3] = {**head(NAMES[3], 1, 256), "error": "ValueError: " + "x" * 300, "out_of_memory": False}
    cells[-4] = {**head(NAMES[1], 8, 4096), "error": "OutOfMemoryError: no room", "out_of_memory": True}
    law = {"cache": {"fixed": 1000, "per_row": 2**20}, "peak": None, "by": "cache", "tried": None, "tries": []}
    largest = [{"name": name, "context": 256, **law, "computed": n} for n, name in enumerate(NAMES)]
    largest[3] = {"name": NAMES[3], "context": 256, "error": "ValueError: no", "out_of_memory": False}
    largest[2] |= {"peak": {"fixed": 0, "per_row": 2**21}, "by": "peak", "tried": 3}
    return deepcopy(
        {
            "format": 1,
            "config": {"name": "toy", "model": "small", "dtype": "float32", "device": "cpu", "artifact": None}
            | {"contexts": CONTEXTS, "batches": BATCHES, "new_tokens": 8, "turns": 4, "baseline": "full"}
            | {"memory": 2**30, "seed": 3},
            "model": {"architecture": "llama", "layers": 2, "config_hash": "c0ffee" * 10, "bytes": 2**20},
            "versions": {"calib": "0.1.0", "torch": "2.13.0", "python": "3.12"},
            "machine": {"processor": "a processor", "threads": 1},
            "cells": cells,
            "largest": largest,
        }
    )


def head(name, batch, context):
    return {"name": name, "group": "", "method": name, "options": {}, "artifact": False} | {
        "batch": batch,
        "context": context,
    }


def row(name, batch, context, cost):
    step = cost * context / 1e6
    quartiles = [0.9 * step, step, 1.2 * step]
    sizes = {"measured_bytes": int(batch * context * 4096 / cost), "host_bytes": 0, "bits_per_value": 16 / cost}
    sizes["predicted_bytes"] = None if name == "rtn-4" else sizes["measured_bytes"] + 1
    alone = {} if name == "full again" else {"sizes": sizes, "peak_bytes": {"prefill": None, "decode": 2**20}}
    return {
        **head(name, batch, context),
        "seconds": dict.fromkeys(KINDS, quartiles),
        "tokens_per_second": [batch / second for second in reversed(quartiles)],
        "speedup": {} if name == "full" else {kind: [0.5, 1 / cost, 2.0] for kind in KINDS},
        **alone,
    }
