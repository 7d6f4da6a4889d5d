"""What operations say of their kernels, and how these become the dispatches of a step."""
