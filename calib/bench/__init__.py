"""`calib bench`: times and memory of methods over a grid of batches and contexts, and the largest batch that fits into a limit.

request       request (what is measured), request_files (YAML and the command line), byte_sizes (24GiB)
measurement   bench_model (the loaded model and the checked request), open_cache (a row's cache in use), peak (memory, from the
              device or the operating system), cache_bytes (one row alone), interleave (all rows in turns), cell (both, for one
              batch and context), grid (all cells), largest_batch (the batch that fits a limit: computed, and tried on a GPU)
reports       document (JSON), run_file (reads it), tables (for the terminal, Markdown and the page), page (HTML) with its curves
"""
