"""What the repository's records were made of is what the repository holds: else a notebook would show other data's."""

from dataclasses import asdict
from types import ModuleType

import pytest

from drehr_utils import artifacts, config
from drehr_utils.data import public_data
from drehr_utils.papers.capr import runs as capr
from drehr_utils.papers.drehr import windows_search
from drehr_utils.papers.kg import runs as kg
from drehr_utils.papers.radiology import runs as radiology
from drehr_utils.profiles import load_profile


@pytest.mark.slow
@pytest.mark.parametrize(
    "runs", [capr, kg, radiology, windows_search], ids=lambda runs: ".".join(runs.__name__.split(".")[-2:])
)
def test_no_committed_record_is_of_other_settings_or_data(runs: ModuleType):
    if runs is kg and public_data.locate("ncbi_disease") is None:
        pytest.skip("its records have NCBI Disease, which isn't here")
    assert [line for line in runs.stale(load_profile("full")) if "not there" not in line] == []


def test_the_settings_that_records_leave_unsaid_are_as_they_were():
    """A digest has what differs from the defaults: where a default changes, all records are to be made again."""
    of = {c: artifacts.digest(asdict(c())) for c in (config.StageConfig, config.PairConfig, config.TripletConfig)}
    assert [*of.values()] == ["109c48d664a0", "e4715716eb1b", "f3710b049591"]
