"""What the servers were seen to do, for the end of the run's output: figures that a green dot would hide."""

from eyrie_api.v1alpha1.prove import ParityReport

SEEN: list[str] = []


def tell(what: str, report: ParityReport) -> None:
    """Keep a report for the summary."""
    SEEN.append(f"{what}: {'holds' if report.passed else 'FAILS'}; {'; '.join(report.reasons)}; "
                f"rounds by accepted tokens {list(report.histogram)}, reference {list(report.reference_histogram)}")
