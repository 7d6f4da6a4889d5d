"""The benchmark behind `infer bench`."""
