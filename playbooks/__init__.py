"""The shipped playbooks and the incident logs they read; `diagnose run NAME` finds them here."""
