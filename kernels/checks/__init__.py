"""What is only for tests and `infer devices --check`."""
