"""`calib eval`: the quality of a model's answers with each method's cache, and the bytes that the cache really takes.

The result is a table: a row is a method, a column is what one task measures, a cell is one row on one column.

request       request (what is evaluated), request_files (YAML and the command line), models (several); entries/ (rows: our
              methods, caches of transformers, answers that another program gave to the cases that cases writes)
tasks/        contract (a column of the table), retrieval, needle and passkey (with haystack), perplexity, agreement (with the
              full cache), distortion (pages against the rate-distortion bound), lm_eval (with lm_eval/: that library's
              tasks, and an adapter for scripts), longeval, gsm8k and humaneval (files; generated, json_lines); chat;
              chunked_text and text (what some of them read); feed (tokens through a cache), generation (generated text),
              checked_program (runs a program that a model wrote, in a separate process)
measurement   cell (one row on one column), cache_size (bytes of its caches), cell_files (finished cells), evaluation (all
              cells), bootstrap, proportion; rate_distortion (the bound), layer_distortion (errors of a layer and their bounds),
              stored (what pages hold, and in how many bits); products (linear layers in float32)
reports       report (Markdown and JSON), page/ (HTML), table (the terminal), tracking (W&B), figures (kinds of figures by name),
              unsolved (columns that the full cache does not solve)
other runs    run_file (reads an earlier run), result_check, compare (two runs side by side), reuse (cells of an earlier run)
"""
