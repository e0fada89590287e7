"""The saver over torch_memory_saver's real binary, over a stand-in for the CUDA driver (``tests/fake_cuda``).

Each ``case_`` function runs in a process of its own; the test of the same name reports what it found.
"""

from __future__ import annotations

import functools
import gc
import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from pitstop.plan import Backup
from pitstop_runtime.errors import CorruptedMemoryError, HandOverError, SaverError
from pitstop_runtime.saver import ParameterCheck, Recomputed, TorchMemorySaver

_HERE = Path(__file__).resolve().parent
_ENVIRONMENT = dict(
    os.environ, PYTHONPATH=f"{_HERE.parent}{os.pathsep}{_HERE}", OMP_NUM_THREADS="1", TORCHDYNAMO_DISABLE="1"
)
_KIB = 1024
_SIDE = 256  # a float32 matrix of 256 KiB

if find_spec("torch") is None:
    pytest.skip("torch is not installed; run `make test`", allow_module_level=True)

RunCase = Callable[..., None]


@pytest.fixture(scope="module")
def run_case() -> Iterator[RunCase]:
    """Run one case in a fresh process and fail with what it printed."""
    if not shutil.which("gcc"):
        pytest.skip("gcc is not installed, and the stand-in CUDA driver is built with it")
    command = [sys.executable, "-W", "ignore", "-m", "fake_cuda.forked", Path(__file__).stem]
    with subprocess.Popen(
        command, env=_ENVIRONMENT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdin is not None
        assert server.stdout is not None

        def run(*name_and_imports: str) -> None:
            server.stdin.write(" ".join(name_and_imports) + "\n")
            server.stdin.flush()
            problem = json.loads(server.stdout.readline() or '"the server of cases has ended"')
            assert problem is None, problem

        yield run
        server.stdin.close()


def make(**options: Any) -> tuple[TorchMemorySaver, Any]:
    """The saver and the stand-in driver of this process."""
    from fake_cuda.saver import StandInBinary, stand_in_saver

    binary = StandInBinary(options.pop("total_bytes", None))
    return stand_in_saver(binary=binary, **options), binary.driver


def matrix(saver: TorchMemorySaver, tag: str = "weights", backup: bool = True, seed: int = 0) -> Any:
    import torch

    values = torch.randn(_SIDE, _SIDE, generator=torch.Generator().manual_seed(seed))
    with saver.region(tag, backup):
        return values.clone()


def refused(kind: type[Exception], *words: str) -> Any:
    return pytest.raises(kind, match="(?s)" + ".*".join(words))


# The memory really goes and comes back.


def case_content_and_address_survive() -> None:
    saver, driver = make()
    weights, moments = matrix(saver), matrix(saver, "optimizer", seed=1)
    before = weights.clone(), moments.clone(), weights.data_ptr()
    for _ in range(3):
        saver.pause()
        assert saver.paused
        assert driver.used() == 0
        assert saver.saved_bytes() == 512 * _KIB
        saver.resume()
        assert not saver.paused
        assert driver.used() == 512 * _KIB
    assert weights.equal(before[0])
    assert moments.equal(before[1])
    assert weights.data_ptr() == before[2]


def case_touching_paused_memory_is_a_fault() -> None:
    import signal

    from fake_cuda.forked import exit_status

    saver, _ = make()
    weights = matrix(saver)
    assert exit_status(weights.sum) == 0
    saver.pause()
    assert exit_status(weights.sum) == -signal.SIGSEGV
    saver.resume()
    assert exit_status(weights.sum) == 0


def case_content_without_backup_is_lost() -> None:
    saver, driver = make()
    gradients = matrix(saver, "gradients", backup=False)
    saver.pause()
    assert driver.pinned() == 0
    saver.resume()
    assert gradients.isnan().all()


def case_disabled_memory_works_while_paused() -> None:
    import torch

    saver, _ = make()
    weights = matrix(saver)
    with saver.region("weights", backup=True), saver.disabled():
        outside = torch.ones(_SIDE, _SIDE)
    saver.pause()
    with saver.disabled():
        buffer = torch.ones(_SIDE, _SIDE)
        assert float((buffer + outside).sum()) == 2 * _SIDE**2
    saver.resume()
    assert not weights.isnan().any()
    assert float(buffer.sum()) == _SIDE**2


def case_dropped_tensors_are_freed_paused_or_not() -> None:
    saver, driver = make()
    first, second = matrix(saver), matrix(saver)
    del first
    assert driver.used() == 256 * _KIB
    saver.pause()
    del second
    gc.collect()
    saver.resume()
    assert driver.used() == 0
    assert driver.pinned() == 0


def case_driver_refuses_a_forked_child() -> None:
    from fake_cuda.forked import exit_status

    saver, _ = make()
    matrix(saver)
    assert exit_status(lambda: matrix(saver)) != 0


# The library ends the process on misuse; the saver must not let it come to that.


def case_double_pause() -> None:
    from fake_cuda.forked import exit_status
    from fake_cuda.saver import StandInBinary

    def without_us() -> None:
        binary = StandInBinary()
        with binary.region("weights", True):
            buffer = binary.allocate(4096)
        binary.pause("weights")
        binary.pause("weights")
        del buffer

    assert exit_status(without_us) == 1  # not the 99 of an exception: the process is gone
    saver, _ = make()
    weights = matrix(saver)
    before = weights.clone()
    saver.pause()
    with refused(SaverError, "weights.*paused already", "Call resume first"):
        saver.pause()
    saver.resume()
    with refused(SaverError, "nothing is paused", "Call pause first"):
        saver.resume()
    assert weights.equal(before)


def case_allocation_under_a_paused_tag() -> None:
    saver, _ = make()
    weights = matrix(saver)
    before = weights.clone()
    saver.pause()
    with refused(SaverError, "region of tag 'weights'", "disabled"):
        matrix(saver)
    # A trainer may also use the library itself:
    binary: Any = saver._binary
    with binary.region("weights", True):
        stray = binary.allocate(4096)
    with refused(SaverError, "at least 1 allocation", "disabled"):
        saver.resume()
    del stray
    saver.resume()
    assert weights.equal(before)


def case_no_device_memory_to_resume() -> None:
    """fzyzcjy/torch_memory_saver#99: the engine still holds the device."""
    saver, driver = make(total_bytes=1024 * _KIB)
    weights = matrix(saver)
    before = weights.clone()
    saver.pause()
    driver.set_total(128 * _KIB)
    with refused(
        HandOverError, "0.25 MiB of device memory are needed", "0.12 MiB are missing", "other owner"
    ):
        saver.resume()
    assert saver.paused
    driver.set_total(1024 * _KIB)
    saver.resume()
    assert weights.equal(before)


def case_no_host_memory_to_pause() -> None:
    from fake_cuda.forked import exit_status
    from fake_cuda.saver import TAGS, StandInBinary

    def host_allocation_fails() -> None:
        saver, driver = make()
        weights = matrix(saver)
        driver.fail_host_allocation()
        saver.pause()
        del weights

    assert exit_status(host_allocation_fails) == 1  # the library's own end
    binary = StandInBinary()
    saver = TorchMemorySaver(host_budget_bytes=0, tags=TAGS, binary=binary, host_available=lambda: 100 * _KIB)
    weights = matrix(saver)
    with refused(SaverError, "0.25 MiB to the host", "102400 bytes", "Recomputed"):
        saver.pause()
    assert not saver.paused
    assert not weights.isnan().any()


def case_allocation_beyond_the_device() -> None:
    import torch

    saver, driver = make(total_bytes=300 * _KIB)
    weights = matrix(saver)
    with pytest.raises(torch.OutOfMemoryError):
        matrix(saver)
    assert driver.used() == 256 * _KIB
    assert not weights.isnan().any()


# Host copies.


def case_backups_reallocated() -> None:
    saver, driver = make()
    weights = matrix(saver)
    for cycle in range(1, 4):
        saver.pause()
        assert driver.pinned() == saver.pinned_bytes() == weights.nbytes
        saver.resume()
        assert driver.pinned() == saver.pinned_bytes() == 0
        assert driver.host_calls() == cycle


def case_backups_retained_then_given_back() -> None:
    saver, driver = make()
    weights = matrix(saver)
    saver.set_backup(Backup.RETAIN)
    for cycle in range(3):
        weights.fill_(cycle)
        saver.pause()
        saver.resume()
        assert driver.pinned() == saver.pinned_bytes() == weights.nbytes
        assert driver.host_calls() == 1
        assert (weights == cycle).all()
    saver.set_backup(Backup.REALLOCATE)
    saver.pause()
    saver.resume()
    assert driver.pinned() == saver.pinned_bytes() == 0


def case_backups_over_budget() -> None:
    saver, driver = make(host_budget_bytes=300 * _KIB)
    saver.set_backup(Backup.RETAIN)
    first = matrix(saver)
    saver.pause()
    saver.resume()
    assert driver.pinned() == first.nbytes
    assert saver.backup_note is None
    second = matrix(saver)  # both together are too much
    warnings: list[str] = []
    logging.getLogger("pitstop_runtime").addHandler(_Collect(warnings))
    for _ in range(2):
        saver.pause()
        saver.resume()
        assert driver.pinned() == saver.pinned_bytes() == 0
    assert saver.backup is Backup.REALLOCATE
    assert "0.50 MiB exceed this process's budget of 0.29 MiB" in str(saver.backup_note)
    assert warnings == [saver.backup_note]
    del second
    saver.pause()
    saver.resume()
    assert saver.backup is Backup.RETAIN
    assert driver.pinned() == saver.pinned_bytes() == first.nbytes


# What comes back is checked.


def case_corrupted_memory_is_detected() -> None:
    """fzyzcjy/torch_memory_saver#71: weights damaged after resume."""
    saver, driver = make()
    weights = [(f"layer.{i}.weight", matrix(saver, seed=i)) for i in range(4)]
    check = ParameterCheck(lambda: weights)
    check.take()
    saver.pause()
    saver.resume()
    assert check.verify() == 4
    check.take()
    saver.pause()
    driver.damage_upload()
    saver.resume()
    with refused(CorruptedMemoryError, r"parameter layer\.\d\.weight", "1 of 4 sampled", "checkpoint"):
        check.verify()


def case_recomputed_needs_torchs_own_memory() -> None:
    import torch

    saver, _ = make()
    gradients = matrix(saver, "gradients", backup=False)
    recomputed = Recomputed()
    with refused(SaverError, r"\(256, 256\)", "cannot be resized", "region"):
        recomputed.add(gradients)
    recomputed.add(torch.zeros(4))


# Real training.


def _train(
    rank: int,
    world_size: int,
    rendezvous: str,
    *,
    options: dict[str, Any],
    switching: bool,
    gradients: bool = True,
) -> dict[str, Any]:
    from megatron_cpu.trainer import Trainer, TrainOptions, join_world

    join_world(rank, world_size, rendezvous)
    saver = driver = None
    if switching:
        from fake_cuda.megatron import adopt_megatron_buffers

        saver, driver = make()
        saver.set_backup(Backup.RETAIN)
        adopt_megatron_buffers(saver, gradients=gradients)
    trainer = Trainer(TrainOptions(**options))
    check, recomputed = ParameterCheck(trainer.model.named_parameters), Recomputed()
    for buffer in () if gradients else trainer.ddp.buffers:
        recomputed.add(buffer.grad_data)
    steps, compared = [], 0
    for _ in range(3):
        steps.append(trainer.step())
        if saver is not None:
            check.take()
            recomputed.release()
            saver.pause()
            assert driver.used() == 0
            assert recomputed.held_bytes() == 0
            saver.resume()
            recomputed.restore()
            compared += check.verify()
    if saver is not None:
        assert compared > 0
        held = trainer.held_bytes()
        kept, gone = held["weight"] + held["optimizer"], held["gradient"] if gradients else 0
        assert kept <= driver.pinned() <= (saver.saved_bytes() or 0) - gone
    return {"steps": steps, "digest": trainer.digest()}


def _same_training(world_size: int, **options: Any) -> None:
    from megatron_cpu.launch import run_ranks

    train = functools.partial(_train, options=options)
    plain = run_ranks(functools.partial(train, switching=False), world_size)
    assert plain[0]["steps"][0] != plain[0]["steps"][2]
    for gradients in (True, False):
        function = functools.partial(train, switching=True, gradients=gradients)
        assert run_ranks(function, world_size) == plain


def case_megatron_distributed_optimizer_trains_the_same() -> None:
    _same_training(2, bf16=True, distributed_optimizer=True)


def case_megatron_master_weights_train_the_same() -> None:
    _same_training(1, bf16=True)


def case_megatron_single_precision_trains_the_same() -> None:
    _same_training(2, tp=2)


# As in production: the library's hook preloaded, its Python package, no injected part.

_PRELOADED = """
import ctypes
from fake_cuda.driver import Driver
from pitstop_runtime.saver import TorchMemorySaver
from torch_memory_saver import torch_memory_saver
torch_memory_saver.hook_mode = "torch"  # as importing megatron-core 0.19 does; it would open a second binary
driver = Driver()
saver = TorchMemorySaver(host_budget_bytes=2**30)
process, pointer = ctypes.CDLL(None), ctypes.c_void_p()
assert process.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(2**20)) == 0
ctypes.memset(pointer, 7, 2**20)
for _ in range(2):
    saver.pause()
    assert driver.used() == 0
    saver.resume()
assert driver.used() == 2**20
assert ctypes.string_at(pointer, 2**20) == b"\\x07" * 2**20
print("done", driver.host_calls())
"""


def case_preloaded_library() -> None:
    from fake_cuda.build import build
    from fake_cuda.saver import preload_library

    preload = {"LD_LIBRARY_PATH": str(build()), "LD_PRELOAD": str(preload_library())}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _PRELOADED],
        env=_ENVIRONMENT | preload | {"TMS_INIT_ENABLE": "1", "TMS_INIT_ENABLE_CPU_BACKUP": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["done", "2"]
    assert "manages no memory" in done.stderr  # torch itself has allocated nothing


def case_not_preloaded_is_refused() -> None:
    with refused(
        SaverError, "not loaded: LD_PRELOAD='' does not name its library", r"LD_PRELOAD=\$\(python3"
    ):
        TorchMemorySaver(host_budget_bytes=0)


_CASES = [name for name in list(globals()) if name.startswith("case_")]


@pytest.mark.parametrize("name", [name.removeprefix("case_") for name in _CASES if "megatron" not in name])
def test_binary(run_case: RunCase, name: str) -> None:
    run_case(f"case_{name}", "fake_cuda.saver")


@pytest.mark.megatron
@pytest.mark.parametrize("name", [name.removeprefix("case_") for name in _CASES if "megatron" in name])
def test_training(run_case: RunCase, name: str) -> None:
    if find_spec("megatron") is None:
        pytest.skip("megatron-core is not installed; run `make test`")
    run_case(f"case_{name}", "fake_cuda.saver", "fake_cuda.megatron", "megatron_cpu.trainer")


class _Collect(logging.Handler):
    def __init__(self, texts: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._texts = texts

    def emit(self, record: logging.LogRecord) -> None:
        self._texts.append(record.getMessage())
