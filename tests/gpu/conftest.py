"""What tests on GPUs share: without one, they are skipped."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def gpus() -> int:
    """Number of GPUs; the test is skipped if there is none."""
    torch = pytest.importorskip("torch")
    found: int = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not found:
        pytest.skip("no CUDA GPU")
    return found
