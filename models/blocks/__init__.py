"""Building blocks of architectures."""
