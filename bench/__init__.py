"""Measurements and acceptance checks: run by hand, never by the test suite."""
