"""Everything that touches vLLM. Functions import vLLM when they need it, so the package imports without it."""
