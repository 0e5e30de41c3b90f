"""The one room that touches vLLM, which is imported where it is used: this package imports without it."""
