"""Real Megatron-core training on CPU over gloo, for tests.

Nothing is computed differently from a GPU: the adaptation only answers "which device?" with "cpu", and
supplies the two layers that upstream has for GPUs only (``layers``). Runs in processes of its own, never
inside pytest:

    PYTHONPATH=tests python -m megatron_cpu.step_use < jobs.json

To run against another Megatron release than the installed one, put its directory first on ``PYTHONPATH``.
"""
