"""Engines: they run (model, recipe, fault or none, seed) and yield one metrics record a step."""
