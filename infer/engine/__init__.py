"""The engine: which step comes next, what it dispatches, and what comes back."""
