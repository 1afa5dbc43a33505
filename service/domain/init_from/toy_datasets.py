"""The data sets that scikit-learn brings along, as `sklearn://` names them."""

from __future__ import annotations

SKLEARN: dict[str, tuple[int, int]] = {
    "breast_cancer": (30, 2),
    "diabetes": (10, 1),
    "digits": (64, 10),
    "iris": (4, 3),
    "wine": (13, 3),
}
"""(columns, classes)."""
