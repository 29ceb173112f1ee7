"""The self-test: every fault hidden in turn in the original, and what the diagnosis made of it."""
