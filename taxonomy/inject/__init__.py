"""The injections behind the fault cards, one module a category. Only workers import them: they need torch."""
