"""The TUI: from a symptom to a verdict without leaving the keyboard, as one more viewer of run folders."""
