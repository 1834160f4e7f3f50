"""`calib eval`: what each method keeps of a model's answers, and the bytes that its cache really takes.

asked         request (what is evaluated), request_files (YAML and the command line), models (several); entries/ (rows:
              methods of ours, caches of transformers, answers given elsewhere to the cases that cases writes)
tasks/        contract (a column of the table), retrieval, needle and passkey (with haystack), perplexity, agreement (with the
              full cache), distortion (pages against the rate-distortion bound), lm_eval (with lm_eval/: that library's
              tasks, and an adapter for scripts), longeval, gsm8k and humaneval (files; generated, json_lines); chat;
              chunked_text and text (what some of them read); feed (tokens through a cache), generation (answers in the
              model's own words), checked_program (a program that a model wrote, in a process of its own)
measured      cell (one row on one column), cache_size (bytes of its caches), cell_files (finished ones), evaluation (all of
              them), bootstrap; rate_distortion (the bound), layer_distortion (a layer's errors beside it), stored (what pages
              hold, and in how many bits)
told          report (Markdown and JSON), page/ (HTML), table (the terminal), tracking (W&B), figures (what their names say)
compared      run_file (an earlier run), compare (now and then)
"""
