"""The service itself: the rooms put together, spoken to over gRPC and HTTP."""
