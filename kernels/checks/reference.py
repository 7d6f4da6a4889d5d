"""Reference formulas that several families of operations share; others are beside each operation.

Arrays are [rows][width] as in the kernels, of any float type; results are float64.
"""

from __future__ import annotations

import numpy as np

from infer.kernels.checks.arrays import Array


def softmax(x: Array) -> Array:
    x = x.astype(np.float64)
    p = np.exp(x - x.max(-1, keepdims=True))
    result: Array = p / p.sum(-1, keepdims=True)
    return result


def nmse(y: Array, reference: Array) -> float:
    """||y - reference||^2 / ||reference||^2, the normalised mean square error."""
    reference = reference.astype(np.float64)
    return float(((y - reference) ** 2).sum() / max((reference**2).sum(), 1e-300))
