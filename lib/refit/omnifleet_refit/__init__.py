"""What the sender and the receivers of a refit share on devices: process groups and the checksum of buckets.

The room knows torch and the core's errors. It must not know an engine, a policy, or either service.
"""
