"""Speed of the teachers' tiers; run ``python -m benchmarks.teachers``."""
