"""The four fault categories, in the wording of the paper's Table 1."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Category:
    """One row of Table 1."""

    id: str
    title: str
    symptoms: str
    causes: str


CATEGORIES: tuple[Category, ...] = (
    Category(
        "framework",
        "Framework and model-state consistency issues",
        "Training–inference divergence; checkpoint or recovery failures",
        "Backend inconsistencies; weight synchronization or conversion errors; "
        "parallelism configuration mismatches",
    ),
    Category(
        "numerics",
        "Operator implementation and numerical consistency issues",
        "Numerical deviations; probability or gradient discrepancies",
        "Operator differences; precision errors; data-layout or reduction-order inconsistencies",
    ),
    Category(
        "routing",
        "Expert routing consistency issues",
        "Routing shifts; expert imbalance; abnormal expert selection",
        "Router errors; Top-k mismatches; expert mapping or dispatch inconsistencies",
    ),
    Category(
        "optimization",
        "Optimization and training stability issues",
        "Reward degradation; KL divergence increase; training instability",
        "Improper optimization settings; reward or KL configuration issues; inadequate gradient clipping",
    ),
)

CATEGORY_BY_ID = {category.id: category for category in CATEGORIES}
