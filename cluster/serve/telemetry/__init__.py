"""What leaves the processes of a service for its operators: metrics through Ray, traces, logs."""
