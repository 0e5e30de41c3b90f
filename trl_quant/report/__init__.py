"""Reports on training runs from their logs, plans of runs, evaluations, and comparisons of trainer and engine."""
