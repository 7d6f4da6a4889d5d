"""From what a user calls a model to its files: bundled, local, or fetched from the hub."""

from infer.hub.resolving import CARD, DEMO, ResolvedModel, resolve, resolve_adapter

__all__ = ["CARD", "DEMO", "ResolvedModel", "resolve", "resolve_adapter"]
