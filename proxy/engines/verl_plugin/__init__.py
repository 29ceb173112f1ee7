"""What runs inside verl's own processes. verl is not edited: `entry` is imported by ``import verl`` in each of them.

Every file here needs the standard library, torch and verl (with what verl itself imports), nothing else. The folder
is copied into a run folder under a name of its own, together with the injections; see `proxy.engines.verl_job`.
"""
