"""The GPU: adapters, devices, shaders, dispatches and what records them, weights."""
