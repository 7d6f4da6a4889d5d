"""From the files of a model to weights on the GPU."""
