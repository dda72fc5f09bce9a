"""The decision: pure functions from (call, host, tables, policy) to a `Decision`."""
