"""Code that only tests and `infer devices --check` use."""
