"""`calib eval`: what each method keeps of a model's answers, and what its cache really weighs.

asked         request (what is evaluated), request_files (YAML and the command line)
tasks/        contract (a column of the table), retrieval, perplexity; feed (tokens through a cache)
measured      cell (one method on one column), cell_files (finished ones), evaluation (all of them), bootstrap
told          report (Markdown and JSON), table (the terminal), paper_counting (sizes as the papers count them)
"""
