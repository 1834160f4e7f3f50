"""lm-eval's tasks through a cache.

rows (what is asked, as tokens), answers (rows through a cache), rows_lm (lm-eval's requests as rows), compressed_lm (the
adapter for scripts of one's own), named_task (a task by its name: its requests and its metrics), metrics (as figures)

    from calib.evaluate.lm_eval.compressed_lm import CompressedLM
"""
