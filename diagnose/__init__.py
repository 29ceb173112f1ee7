"""Finds the cause of a failing RL run: playbooks, logs, scoring, reports, command line, screen. Never imports torch."""
