"""Chooses into how many tiles an image is cut."""

from __future__ import annotations

from infer.images.processor import Size


def best_tiles(height: int, width: int, tile: Size, least: int, most: int) -> Size:
    """Returns the rows and columns of at least `least` and at most `most` tiles whose aspect is
    nearest to an image's. Of several with that aspect the last whose area is less than twice the
    image's: it has most tiles."""
    shapes = [
        (columns, rows)
        for columns in range(1, most + 1)
        for rows in range(1, most + 1)
        if least <= columns * rows <= most
    ]
    best, nearest = (1, 1), float("inf")
    for columns, rows in sorted(shapes, key=lambda shape: shape[0] * shape[1]):
        apart = abs(width / height - columns / rows)
        if apart < nearest:
            best, nearest = (rows, columns), apart
        elif apart == nearest and width * height > 0.5 * tile[0] * tile[1] * columns * rows:
            best = (rows, columns)
    return best
