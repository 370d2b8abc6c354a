"""Clients of every service: what users import. One file or folder a service; they speak gRPC and know no server code."""
