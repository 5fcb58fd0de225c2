"""What an operator looks at: metrics, traces, the log of the loop, the API's own description."""
