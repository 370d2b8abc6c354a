"""What people and machines see of a running service: logs, counters, Prometheus metrics. Decides nothing."""
