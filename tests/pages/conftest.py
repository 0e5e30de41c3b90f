"""The sources of the repository, for the tests of its rules."""

import pytest
from sources import Sources, all_sources


@pytest.fixture
def sources() -> Sources:
    return all_sources()
