"""Where things stand in the repository, for the tests."""

from pathlib import Path


HELPERS = Path(__file__).parent
TESTS = HELPERS.parent
ROOT = TESTS.parent
BENCHMARKS, EXAMPLES, NOTEBOOKS = ROOT / "benchmarks", ROOT / "examples", ROOT / "notebooks"
WORD_PROBLEMS = TESTS / "data" / "word_problems.jsonl"  # an excerpt of GSM8K
