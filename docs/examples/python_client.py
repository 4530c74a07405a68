"""Starts a job, follows it and prints the decision: `python python_client.py job.yaml [URL of a control plane]`."""

import sys
from pathlib import Path

from eyrie_api.cli.spec import build_job
from eyrie_api.client import DEFAULT_SERVER, Client

spec = build_job(file=Path(sys.argv[1]))
with Client(sys.argv[2] if len(sys.argv) > 2 else DEFAULT_SERVER) as client:
    plan = client.plan(spec)
    print(f"planned: {plan.total_tokens} tokens, {plan.total_bytes_on_disk} bytes, {plan.total_hours:.2f} h")
    job = client.create_job(spec)
    for event in client.events(job.id):  # ends with the job, and survives restarts of the server
        print(event.time.time().isoformat("seconds"), event.reason, event.message)
    report = client.report(job.id)
    for entry in report.leaderboard:
        print(f"{entry.checkpoint}: {entry.speedup:.2f}x")
    if report.decision is not None:
        print("promote" if report.decision.promote else "not promoted", *report.decision.reasons, sep="\n  ")
