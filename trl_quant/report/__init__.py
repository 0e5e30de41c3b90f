"""What the logs of training runs say: runs, findings, panels, pages."""
