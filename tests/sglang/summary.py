"""Figures of the servers for the end of pytest's output, which a passed test does not show."""

from eyrie_api.contract.prove import ParityReport

SUMMARY: list[str] = []


def add_to_summary(what: str, report: ParityReport) -> None:
    """Add a report to the summary."""
    SUMMARY.append(f"{what}: {'holds' if report.passed else 'FAILS'}; {'; '.join(report.reasons)}; "
                f"rounds by accepted tokens {list(report.histogram)}, reference {list(report.reference_histogram)}")
