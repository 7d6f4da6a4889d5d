"""Text and chat messages to ids, and back."""
