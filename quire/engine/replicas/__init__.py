"""Several engines behind one `AsyncLLM`: replicas of a model, on one machine or many."""
