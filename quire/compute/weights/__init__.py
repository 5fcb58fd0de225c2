"""From a checkpoint's files to parameters: finding, checking, streaming. Only `loader` and `dummy` import torch."""
