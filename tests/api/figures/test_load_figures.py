"""Figures of load reports, made for the purpose."""

import pytest

from eyrie_api.contract.figures import Figure
from eyrie_api.contract.load import LoadLevel, LoadReport
from eyrie_api.figures.load_figures import load_figures
from tests.pipelines.rehearsal.rehearsal_stage import load_report

NAMES = ["load-throughput", "load-latency", "load-latency-by-rate", "load-categories", "load-acceptance"]


def whole() -> LoadReport:
    """A report with users and rates, categories, and acceptance of the candidate."""
    report = load_report((1, 4, 16), ("off", "candidate"), 2.0)

    def drafting(level: LoadLevel) -> LoadLevel:
        total = level.total.model_copy(update={"accepted_histogram": (20, 20, 9, 1)})
        return level.model_copy(update={"total": total}) if level.variant == "candidate" else level

    levels = tuple(drafting(level).model_copy(update={"mode": mode}) for level in report.levels
                   for mode in ("closed", "open"))
    compared = tuple(ratio.model_copy(update={"by_category": {"chat": 1.2, "code": 0.98}})
                     for ratio in report.comparisons)
    return report.model_copy(update={"levels": levels, "comparisons": compared, "crossover": 9.3})


def by_name(report: LoadReport) -> dict[str, Figure]:
    return {figure.name: figure for figure in load_figures(report)}


def test_a_load_test_gets_the_figures_that_it_has_data_for() -> None:
    assert list(by_name(load_report((1, 4), ("off", "candidate"), 2.0))) == NAMES[:2]
    assert list(by_name(whole())) == NAMES


def test_titles_say_what_was_found() -> None:
    found = by_name(whole())
    assert found["load-throughput"].title == "candidate: 2.00x for 1 user; below off in total from 9.3 users on"
    assert found["load-categories"].title == "candidate loses in code at 1 user (0.98x)"
    alone = by_name(load_report((1, 4), ("off",), 1.0))
    assert alone["load-throughput"].title.startswith("off: at most ")
    assert "requests per level and variant" in found["load-latency"].caption


def test_positions_that_hardly_any_round_reached_are_not_shown() -> None:
    data = by_name(whole())["load-acceptance"].spec["data"]
    assert isinstance(data, dict)
    rows = data["values"]
    # 6 levels: 300 rounds, of which 180, 60 and 6 accepted at least one, two and three tokens.
    assert [(row["position"], row["rounds"], row["acceptance"]) for row in rows] == [  # type: ignore[index,call-overload,union-attr]
        (1, 300, 0.6), (2, 180, 0.333333), (3, 60, 0.1)]


def test_vega_lite_draws_them() -> None:
    vl_convert = pytest.importorskip("vl_convert", reason="pip install 'eyrie[plots]'")
    for figure in load_figures(whole()):
        drawn = vl_convert.vegalite_to_svg(figure.spec | {"config": figure.themes["dark"]}, vl_version="5.21")
        assert "NaN" not in drawn
        assert "null" not in drawn
