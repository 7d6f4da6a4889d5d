"""Local LLM inference on WebGPU."""
