"""The lexicon, the open collections and their entries, read once."""

import pytest

from drehr_utils.papers.radiology.entries import label_entries
from drehr_utils.papers.radiology.lexicon import FindingMatcher, read_lexicon
from drehr_utils.papers.radiology.reports import OPEN_CXR, read_collection


@pytest.fixture(scope="session")
def matcher():
    return FindingMatcher(read_lexicon())


@pytest.fixture(scope="session")
def collections():
    return {c: read_collection(OPEN_CXR / f"collection_{c}.jsonl.gz") for c in "ab"}


@pytest.fixture(scope="session")
def entries(matcher, collections):
    return {c: label_entries((s for r in reports for s in r.sentences), matcher) for c, reports in collections.items()}
