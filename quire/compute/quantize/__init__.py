"""Making quantised checkpoints: layer by layer, calibrated with text, written as compressed-tensors folders."""
