"""The two figures that are exact, so that a test may hold ours to them: memory and bytes written."""

from __future__ import annotations

import pytest

from ckpt_core.bench import OURS, Measure, Report, Settings, run

STAGING_BYTES = 64 * 2**20
SLACK_BYTES = 32 * 2**20


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    settings = Settings(
        root=tmp_path_factory.mktemp("bounds"),
        state_bytes=200 * 10**6,
        leaves=96,
        rounds=2,
        contenders=(OURS,),
        measures=(Measure.SAVE,),
        staging_bytes=STAGING_BYTES,
    )
    report = run(settings)
    assert report.entrants[OURS].reason is None
    return report


def test_saving_never_takes_more_memory_than_staging_allows(report: Report) -> None:
    (peak,) = report.values["peak_memory"][OURS]
    assert peak <= STAGING_BYTES + SLACK_BYTES


def test_saving_writes_the_state_once_and_next_to_nothing_else(report: Report) -> None:
    if "write_amplification" not in report.values:
        pytest.skip("this filesystem does not count what is written")
    for factor in report.values["write_amplification"][OURS]:
        assert 1.0 <= factor <= 1.01
