"""What can go wrong: categories, symptoms, canonical metrics, stages, fault cards and their injections."""
