"""Reports the requests of a router: metrics, traces, and one log line for each."""
