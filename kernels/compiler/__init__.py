"""From a traced forward pass to the kernels of a step."""
