"""lm-eval's tasks with a compressed cache.

rows (requests as tokens), answers (feeds rows through a cache), rows_lm (turns lm-eval's requests into rows), replay (records rows
and gives back answers), compressed_lm (the adapter for users' scripts), named_task (a task by its name: requests and metrics),
metrics (lm-eval's metrics as figures)

    from calib.evaluate.lm_eval.compressed_lm import CompressedLM
"""
