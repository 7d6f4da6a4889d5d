"""Building blocks that architectures share: decoder, layers, experts, states, positions."""
