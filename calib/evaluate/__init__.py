"""`calib eval`: what each method keeps of a model's answers, and what its cache really weighs.

asked         request (what is evaluated), request_files (YAML and the command line)
tasks/        contract (a column of the table), retrieval, needle, perplexity, agreement (with the full cache), distortion
              (pages against the rate-distortion bound), text (what some of them read); feed (tokens through a cache)
measured      cell (one method on one column), cell_files (finished ones), evaluation (all of them), bootstrap; rate_distortion
              (the bound), layer_distortion (a layer's errors beside it), stored (what pages hold, and in how many bits)
told          report (Markdown and JSON), page/ (HTML), table (the terminal), figures (what their names say),
              paper_counting (sizes as the papers count them)
compared      run_file (an earlier run), compare (now and then)
"""
