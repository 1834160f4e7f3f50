"""`--plan` of `calib fit`, `calib eval` and `calib bench`: what a run holds, writes and takes, before any weight is loaded.

a fit         plan, with capture_cost, artifact_size, dry_run, peaks, probe, duration; text
the others    eval_plan, bench_plan, with planned_subject, run_memory, run_time; run_text, run_command
of all        meta_model and meta_tensors (modules and stores without numbers), cache_sizes, neighbours
"""
