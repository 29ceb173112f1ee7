"""`make study`: the bars of the scoring, measured."""
