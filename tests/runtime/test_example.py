"""The example is run as printed, two ranks over gloo, against a service that recommends another plan meanwhile."""

from __future__ import annotations

import json
import os
import re
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from telemetry_servers import FakeServer, Reply, Request, well_behaved
from trainer_example import ROOT, command

from pitstop.plan import NAMED_PLANS
from pitstop.telemetry import RunManifest, StepRecord

pytestmark = pytest.mark.megatron

RECOMMENDED = "lean-released"
STEPS = 4


def service(request: Request) -> Reply:
    path = urlsplit(request.path).path
    if path == "/v1/recommendations/current":
        plan = NAMED_PLANS[RECOMMENDED].model_dump(mode="json")
        later = datetime.now(UTC) + timedelta(hours=1)
        return Reply(200, {"id": "r-1", "plan": plan, "expires_at": later.isoformat(), "reason": "a test"})
    if path.startswith("/v1/recommendations/"):
        return Reply(200, {})
    return well_behaved(request)


def test_the_example_as_printed_with_a_service(fake: FakeServer, tmp_path: Path) -> None:
    fake.answer = service
    done = subprocess.run(
        [*command(), "--steps", str(STEPS), "--service", fake.url, "--spool", str(tmp_path)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    said = re.findall(r"^step (\d+): switched by ([a-z-]+), loss ([\d.]+)$", done.stdout, re.MULTILINE)
    assert [int(step) for step, *_ in said] == list(range(STEPS))
    plans = [plan for _, plan, _ in said]
    # The first switch goes the baseline's way, with two cooldowns: by its end the recommendation has long arrived.
    assert plans == ["reload", *[RECOMMENDED] * (STEPS - 1)]
    losses = [float(loss) for *_, loss in said]
    assert losses[-1] < losses[0]

    (registered,) = [request for request in fake.requests if request.path == "/v1/runs"]
    assert RunManifest.model_validate_json(registered.body).plan == NAMED_PLANS["lean"]
    records = [
        StepRecord.model_validate(each)
        for batch in fake.batches()
        for each in json.loads(batch.body)["steps"]
    ]
    assert [record.step for record in records] == list(range(STEPS))
    assert [record.plan for record in records] == plans
    assert all(record.fallback is None for record in records)
    outcomes = [request for request in fake.requests if request.path.endswith("/outcomes")]
    assert [request.path for request in outcomes] == ["/v1/recommendations/r-1/outcomes"]
    assert json.loads(outcomes[0].body) == {"outcome": "applied", "detail": ""}
