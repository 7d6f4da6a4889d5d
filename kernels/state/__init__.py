"""State that lasts between steps: keys and values, states of layers, rows, the sampler."""
