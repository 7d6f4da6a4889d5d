"""Model architectures: one file each, named after config.json's model_type."""
