"""The half that runs: device, layers, weights, models, sampling, runner. Owns tensors; owns no policy."""
