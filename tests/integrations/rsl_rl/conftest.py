"""Without rsl_rl the tests here are skipped, and the modules that they share are not imported."""

from importlib.util import find_spec

collect_ignore = [] if find_spec("rsl_rl") else ["arm.py", "gpu_checks.py", "rank_job.py"]
