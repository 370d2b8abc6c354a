"""Where a run's metrics go besides `metrics.jsonl`: one file per library, all optional.

feeding.py follows the journal beside the loop, so a slow or absent sink costs no step anything. The room knows the
journal's records and nothing of what they mean.
"""
