"""`--plan` of `calib fit`, `calib eval` and `calib bench`: predicts memory, disk space and time before any weight is loaded.

fit              plan, with capture_cost, artifact_size, dry_run, peaks, probe, duration; text
eval and bench   eval_plan, bench_plan, with planned_subject, run_memory, run_time; run_text, run_command
used by all      meta_model and meta_tensors (modules and stores on the `meta` device), cache_sizes, neighbours
"""
