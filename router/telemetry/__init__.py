"""What a router tells about its requests: metrics, traces, a line of log for each."""
