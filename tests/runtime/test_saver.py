"""The saver's rules, with a stand-in for the library; ``test_saver_binary`` has the real one."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pitstop.plan import Backup
from pitstop.units import GIB, MIB
from pitstop_runtime.errors import CorruptedMemoryError, HandOverError, SaverError
from pitstop_runtime.saver import (
    AllocatorReport,
    LibraryBinary,
    NullSaver,
    ParameterCheck,
    Recomputed,
    Saver,
    TorchMemorySaver,
    Usage,
    available_host_bytes,
    check_headroom,
    host_budget,
)
from pitstop_runtime.saver.preload import check_preload, manages_everything

torch = pytest.importorskip("torch", reason="torch is not installed; run `make test`")

FREE = AllocatorReport("0", 139 * GIB, 139 * GIB, 0, 0)


@dataclass
class Library:
    """Does nothing but remember; fails where it is told to."""

    calls: list[str] = field(default_factory=list)
    broken: set[str] = field(default_factory=set)
    now: Usage = Usage(8 * GIB, 6 * GIB)  # noqa: RUF009 - frozen
    figures: AllocatorReport | None = FREE

    def _call(self, what: str) -> None:
        self.calls.append(what)
        if what in self.broken:
            raise RuntimeError(f"{what} is broken")

    def pause(self, tag: str) -> None:
        self._call(f"pause {tag}")

    def resume(self, tag: str) -> None:
        self._call(f"resume {tag}")

    def retain(self, keep: bool) -> None:
        self._call(f"retain {keep}")

    @contextmanager
    def region(self, tag: str, backup: bool) -> Iterator[None]:
        self._call(f"enter {tag} {backup}")
        yield
        self._call(f"leave {tag}")

    @contextmanager
    def disabled(self) -> Iterator[None]:
        self._call("disable")
        yield
        self._call("enable")

    def usage(self) -> Usage:
        return self.now

    def report(self) -> AllocatorReport | None:
        return self.figures

    def synchronize(self) -> None:
        self._call("synchronize")


def make(library: Library, **options: Any) -> TorchMemorySaver:
    given = {"host_budget_bytes": 100 * GIB, "tags": ("a", "b", "c"), "host_available": lambda: 100 * GIB}
    return TorchMemorySaver(binary=library, **(given | options))


def test_tags_go_in_order_and_come_back_in_reverse() -> None:
    library = Library()
    saver = make(library)
    saver.pause()
    saver.resume()
    expected = "synchronize|pause a|pause b|pause c|retain False|resume c|resume b|resume a|synchronize"
    assert library.calls == expected.split("|")


@pytest.mark.parametrize("saver", [NullSaver(), make(Library())], ids=["null", "torch"])
def test_double_pause_and_double_resume(saver: Saver) -> None:
    for _ in range(2):
        assert not saver.paused
        with pytest.raises(SaverError, match=r"nothing is paused\. Call pause first"):
            saver.resume()
        saver.pause()
        assert saver.paused
        with pytest.raises(SaverError, match=r"paused already\. Call resume first"):
            saver.pause()
        saver.resume()


def test_null_saver_saves_nothing() -> None:
    saver = NullSaver()
    saver.set_backup(Backup.RETAIN)
    with saver.region("a", backup=True), saver.disabled():
        assert (saver.name, saver.saved_bytes(), saver.pinned_bytes()) == ("none", 0, 0)


def test_failed_pause_is_undone() -> None:
    library = Library(broken={"pause c"})
    saver = make(library)
    with pytest.raises(
        SaverError, match=r"pausing tag c failed: pause c is broken\. All memory is in use again"
    ):
        saver.pause()
    assert library.calls[-3:] == ["pause c", "resume b", "resume a"]
    assert not saver.paused
    library.broken.clear()
    saver.pause()
    saver.resume()


def test_failed_undoing_says_what_is_still_paused() -> None:
    library = Library(broken={"pause c", "resume a"})
    saver = make(library)
    with pytest.raises(SaverError, match=r"Undoing it failed too: resume a is broken\. Still paused: tag a;"):
        saver.pause()
    assert saver.paused
    library.broken.clear()
    library.calls.clear()
    saver.resume()
    assert [call for call in library.calls if call.startswith("resume")] == ["resume a"]


def test_failed_resume_can_be_called_again() -> None:
    library = Library(broken={"resume b"})
    saver = make(library)
    saver.pause()
    with pytest.raises(
        SaverError, match=r"resuming tag b failed: resume b is broken\. Still paused: tags a, b;"
    ):
        saver.resume()
    assert saver.paused
    library.broken.clear()
    library.calls.clear()
    library.figures = replace(FREE, driver_free_bytes=3 * GIB)  # c has its part already
    saver.resume()
    assert library.calls == ["retain False", "resume b", "resume a", "synchronize"]


def test_regions_need_a_declared_tag_and_memory_in_use() -> None:
    library = Library()
    saver = make(library)
    with saver.region("b", backup=True):
        assert library.calls == ["enter b True"]
        with pytest.raises(SaverError, match=r"1 region\(s\) of the saver are open"):
            saver.pause()
    with (
        pytest.raises(SaverError, match=r"tag 'd' was not declared.*Declared: tags a, b, c\."),
        saver.region("d", backup=True),
    ):
        pass
    saver.pause()
    with (
        pytest.raises(SaverError, match="region of tag 'a' was entered while memory is paused"),
        saver.region("a", backup=True),
    ):
        pass
    with saver.disabled():
        assert library.calls[-1] == "disable"


@pytest.mark.parametrize("tags", [(), ("a", "a"), ("a", "")])
def test_tags_are_distinct_and_not_empty(tags: tuple[str, ...]) -> None:
    with pytest.raises(SaverError, match="tags must be distinct and not empty"):
        make(Library(), tags=tags)


def test_only_one_of_many_threads_pauses() -> None:
    library = Library()
    saver = make(library)
    errors: list[SaverError] = []
    start = threading.Barrier(8)

    def pause() -> None:
        start.wait()
        try:
            saver.pause()
        except SaverError as error:
            errors.append(error)

    threads = [threading.Thread(target=pause) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) == 7
    assert [call for call in library.calls if call.startswith("pause")] == ["pause a", "pause b", "pause c"]


def test_memory_allocated_under_the_saver_while_paused() -> None:
    library = Library(now=Usage(8 * GIB, 6 * GIB, allocated=10, freed=2))
    saver = make(library)
    saver.pause()
    library.now = replace(library.now, allocated=13, freed=3)
    with pytest.raises(
        SaverError, match=r"at least 2 allocation\(s\) were made under the saver.*empty_cache"
    ):
        saver.resume()
    assert saver.paused
    library.now = replace(library.now, freed=5)
    saver.resume()


def test_resume_without_room_is_refused_and_names_all_shares() -> None:
    """fzyzcjy/torch_memory_saver#99: the engine took the memory again before the trainer was done."""
    library = Library(figures=AllocatorReport("0", 3 * GIB, 139 * GIB, 8 * GIB, 7 * GIB))
    saver = make(library)
    saver.pause()
    with pytest.raises(HandOverError) as caught:
        saver.resume()
    text = str(caught.value)
    assert "8.00 GiB of device memory are needed and 5.00 GiB are missing" in text
    assert "reserves 8.00 GiB, 8.00 GiB of it paused" in text
    assert "hold 136.00 GiB" in text
    assert "empty_cache" not in text  # what is paused is not on the device
    assert saver.paused
    library.figures = FREE
    saver.resume()


def test_pause_without_host_memory_is_refused() -> None:
    saver = make(Library(), host_available=lambda: 5 * GIB)
    with pytest.raises(SaverError, match=r"6\.00 GiB to the host.*5\.00 GiB of host memory are available"):
        saver.pause()
    assert not saver.paused


def test_retained_copies_need_no_more_host_memory() -> None:
    available = [100 * GIB]
    library = Library()
    saver = make(library, host_available=lambda: available[0])
    saver.set_backup(Backup.RETAIN)
    assert saver.pinned_bytes() == 0
    for _ in range(2):
        saver.pause()
        assert saver.pinned_bytes() == 6 * GIB
        saver.resume()
        assert saver.pinned_bytes() == 6 * GIB
        assert "retain True" in library.calls
        available[0] = 0


def test_backups_over_budget_fall_back_and_say_why(caplog: pytest.LogCaptureFixture) -> None:
    saver = make(library := Library(), host_budget_bytes=4 * GIB)
    assert saver.backup_note is None
    saver.set_backup(Backup.RETAIN)
    for _ in range(2):
        saver.pause()
        saver.resume()
    assert "retain True" not in library.calls
    assert saver.backup is Backup.REALLOCATE
    assert saver.backup_note is not None
    assert "6.00 GiB exceed this process's budget of 4.00 GiB" in saver.backup_note
    assert [record.getMessage() for record in caplog.records] == [saver.backup_note]
    assert saver.pinned_bytes() == 0
    library.now = Usage(8 * GIB, 3 * GIB)
    saver.pause()
    saver.resume()
    assert (saver.backup, saver.backup_note) == (Backup.RETAIN, None)
    assert saver.pinned_bytes() == 3 * GIB


def test_saved_bytes_are_those_of_the_pause() -> None:
    saver = make(library := Library())
    saver.pause()
    library.now = Usage(None, 0)
    assert saver.saved_bytes() == 8 * GIB
    saver.resume()
    assert saver.saved_bytes() is None


def test_a_saver_without_memory_warns(caplog: pytest.LogCaptureFixture) -> None:
    make(Library(now=Usage(0, 0))).pause()
    assert "manages no memory" in caplog.text


# Host memory.


def write_host(folder: Path, available_kib: int, **cgroup: str) -> tuple[Path, Path]:
    meminfo, group = folder / "meminfo", folder / "cgroup"
    meminfo.write_text(f"MemTotal: 99 kB\nMemAvailable: {available_kib} kB\n")
    group.mkdir()
    for name, text in cgroup.items():
        (group / f"memory.{name}").write_text(text)
    return meminfo, group


def test_host_memory_available(tmp_path: Path) -> None:
    assert available_host_bytes(*write_host(tmp_path, 1024)) == MIB
    assert available_host_bytes() > 0


@pytest.mark.parametrize(
    ("limit", "expected"), [("max", 8 * MIB), (str(4 * MIB), 3 * MIB), (str(MIB), 0), (str(GIB), 8 * MIB)]
)
def test_host_memory_of_a_container(tmp_path: Path, limit: str, expected: int) -> None:
    stat = f"anon 1\ninactive_file {MIB}\n"
    files = write_host(tmp_path, 8 * 1024, max=limit, current=str(2 * MIB), stat=stat)
    assert available_host_bytes(*files) == expected


def test_host_budget() -> None:
    assert host_budget(800 * GIB, ranks_per_node=8, share=0.5) == 50 * GIB
    assert 0 < host_budget(ranks_per_node=2) < available_host_bytes()
    for wrong in ({"ranks_per_node": 0}, {"share": 0.0}, {"share": 1.5}):
        with pytest.raises(SaverError, match="ranks_per_node >= 1 and 0 < share <= 1"):
            host_budget(GIB, **wrong)


def test_host_memory_unknown(tmp_path: Path) -> None:
    with pytest.raises(SaverError, match="give node_available_bytes yourself"):
        available_host_bytes(tmp_path / "none")


# Device memory.


def test_allocator_report_reads_like_a_sentence() -> None:
    report = AllocatorReport("0", 3 * GIB, 139 * GIB, 60 * GIB, 50 * GIB)
    assert str(report) == (
        "device 0: the driver has 3.00 GiB free of 139.00 GiB; torch's caching allocator reserves 60.00 GiB "
        "(50.00 GiB in tensors, 10.00 GiB cached); other processes, communicators and contexts hold 76.00 GiB"
    )


def test_headroom_error_names_the_allocators_share() -> None:
    """TideDra/lmm-r1#43, THUDM/slime#669: torch saw free memory that was its own cache."""
    full = AllocatorReport("0", 3 * GIB, 139 * GIB, 60 * GIB, 50 * GIB)
    with pytest.raises(HandOverError) as caught:
        check_headroom(8 * GIB, report=lambda _: full)
    text = str(caught.value)
    for part in (
        "8.00 GiB of device memory are needed",
        "3.00 GiB free",
        "10.00 GiB cached",
        "empty_cache()",
    ):
        assert part in text
    with pytest.raises(HandOverError, match="Wait until the other owner"):
        check_headroom(20 * GIB, report=lambda _: full)
    with pytest.raises(HandOverError, match=r"an unknown part of it paused.*Wait until the other owner"):
        check_headroom(8 * GIB, paused_bytes=None, report=lambda _: full)


def test_headroom_asks_for_the_right_device() -> None:
    asked: list[int | None] = []

    def report(device: int | None) -> AllocatorReport:
        asked.append(device)
        return FREE

    assert check_headroom(139 * GIB, 3, report=report) == FREE
    assert asked == [3]


# Tensors whose content need not survive.


def test_recomputed_views_stay_valid() -> None:
    buffer = torch.arange(1000, dtype=torch.float32)
    views = [buffer[100:200], buffer.view(10, 100)[3]]
    recomputed = Recomputed()
    for tensor in (buffer, *views):
        recomputed.add(tensor)
    assert (recomputed.release(), recomputed.release()) == (4000, 0)
    assert recomputed.released
    assert recomputed.held_bytes() == buffer.untyped_storage().nbytes() == 0
    assert (recomputed.restore(), recomputed.restore()) == (4000, 0)
    assert not recomputed.released
    assert not buffer.any()
    buffer.fill_(2)
    for view in views:
        assert float(view.sum()) == 200
    views[0].fill_(3)
    assert float(buffer.sum()) == 2 * 900 + 3 * 100


def test_recomputed_keeps_gradients_of_parameters_attached() -> None:
    parameter = torch.nn.Parameter(torch.ones(64))
    buffer = torch.zeros(128)
    parameter.grad = buffer[64:]
    recomputed = Recomputed()
    recomputed.add(buffer)
    for _ in range(2):
        recomputed.release()
        recomputed.restore()
        (parameter * 3).sum().backward()
        assert float(buffer.sum()) == 3 * 64


def test_recomputed_refuses_what_it_cannot_give_back() -> None:
    recomputed = Recomputed()
    foreign = torch.frombuffer(bytearray(4096), dtype=torch.uint8).view(64, 64)
    with pytest.raises(SaverError, match=r"shape \(64, 64\).*cannot be resized.*region\(tag, backup=False\)"):
        recomputed.add(foreign)
    with pytest.raises(SaverError, match=r"a parameter of shape \(3,\).*main_grad"):
        recomputed.add(torch.nn.Parameter(torch.ones(3)))
    recomputed.add(torch.ones(3))
    recomputed.release()
    with pytest.raises(SaverError, match="restore first"):
        recomputed.add(torch.ones(3))


def test_recomputed_goes_on_after_a_failed_restore(monkeypatch: pytest.MonkeyPatch) -> None:
    recomputed = Recomputed()
    tensors = [torch.ones(1000), torch.ones(2000)]
    for tensor in tensors:
        recomputed.add(tensor)
    recomputed.release()
    resize = torch.UntypedStorage.resize_

    def resize_small(storage: Any, size: int) -> Any:
        if size > 4000:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return resize(storage, size)

    with monkeypatch.context() as patch:
        patch.setattr(torch.UntypedStorage, "resize_", resize_small)
        with pytest.raises(
            SaverError, match=r"no memory to restore a buffer of 8000 bytes \(8000 bytes to go\)"
        ):
            recomputed.restore()
    assert recomputed.released
    assert recomputed.restore() == 8000
    assert float(torch.cat(tensors).sum()) == 0


# Checksums.

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.uint8, torch.bool, torch.complex128]


def flip_bit(tensor: Any, byte: int) -> None:
    tensor.detach().reshape(-1).view(torch.uint8)[byte] ^= 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_checksum_notices_one_bit(dtype: Any) -> None:
    weight = torch.randint(0, 2, (37, 5)).to(dtype)
    check = ParameterCheck(lambda: [("layer.weight", weight)])
    check.take()
    assert check.verify() == 1
    check.take()
    flip_bit(weight, weight.nbytes // 2)
    with pytest.raises(CorruptedMemoryError) as caught:
        check.verify()
    before, after = str(caught.value).split("checksum ")[1].split(" before, ")
    assert "parameter layer.weight changed" in str(caught.value)
    assert len(before) == 16
    assert before != after[:16]


def test_checksum_notices_elements_that_trade_places() -> None:
    weight = torch.arange(100.0)
    check = ParameterCheck(lambda: [("w", weight)])
    check.take()
    weight.copy_(weight.flip(0))
    with pytest.raises(CorruptedMemoryError, match=r"parameter w changed.*1 of 1 sampled"):
        check.verify()


def test_checksum_works_on_views_at_odd_offsets() -> None:
    weight = torch.arange(101, dtype=torch.bfloat16)[1:]
    check = ParameterCheck(lambda: [("w", weight)], bytes_each=10)
    check.take()
    check.verify()


def test_checksum_draws_another_sample_each_time() -> None:
    model = torch.nn.ModuleList(torch.nn.Linear(8, 8, bias=False) for _ in range(20))
    check = ParameterCheck(model.named_parameters, tensors=3, bytes_each=64, seed=1)
    texts = []
    for _ in range(100):
        check.take()
        flip_bit(model[7].weight, 128)
        try:
            assert check.verify() == 3
        except CorruptedMemoryError as error:
            texts.append(str(error))
    # Drawn with 3 of 20, and then the damaged element is in 16 of 49 windows: 5 times on average.
    assert 0 < len(texts) < 20
    assert all("7.weight" in text for text in texts)


def test_checksum_reads_little() -> None:
    big = torch.zeros(10_000_000)
    check = ParameterCheck(lambda: [("big", big)], bytes_each=1000)
    assert check._sample()[0][1].nbytes == 1000


def test_checksum_without_anything_to_compare() -> None:
    check = ParameterCheck(lambda: [("w", torch.ones(4, 4).t()), ("empty", torch.ones(0))])
    with pytest.raises(SaverError, match="no contiguous parameter"):
        check.take()
    with pytest.raises(SaverError, match="verify was called without take"):
        check.verify()


# The library's preconditions.

HOOK = "/site/torch_memory_saver_hook_mode_preload_cu12.abi3.so"
GOOD = {"LD_PRELOAD": f"{HOOK}:/other.so", "TMS_INIT_ENABLE": "1", "TMS_INIT_ENABLE_CPU_BACKUP": "1"}


def test_preload_as_it_should_be() -> None:
    assert check_preload(GOOD, loaded=f"7f00 r-xp {HOOK}\n", cuda="12.8") == Path(HOOK)
    assert manages_everything(GOOD)
    regions_only = {"LD_PRELOAD": HOOK}
    check_preload(regions_only, loaded=HOOK)
    assert not manages_everything(regions_only)


@pytest.mark.parametrize(
    ("change", "loaded", "message"),
    [
        ({"LD_PRELOAD": "/libnccl.so.2"}, HOOK, "does not name its library"),
        ({"LD_PRELOAD": f"{HOOK} {HOOK}"}, HOOK, "names 2 of its libraries"),
        ({}, "7f00 r-xp /lib/libc.so.6", "was set after the process had started"),
        (
            {"LD_PRELOAD": HOOK.replace("cu12", "cu13")},
            HOOK.replace("cu12", "cu13"),
            "torch was built for CUDA 12.8",
        ),
        ({"TMS_INIT_ENABLE_CPU_BACKUP": "0"}, HOOK, "would come back as garbage"),
        ({"TMS_INIT_ENABLE": "on"}, HOOK, "TMS_INIT_ENABLE='on' is not understood"),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, HOOK, "Remove expandable_segments"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "a:1,expandable_segments: true"}, HOOK, "Remove expandable_segments"),
    ],
)
def test_preload_problems(change: dict[str, str], loaded: str, message: str) -> None:
    with pytest.raises(SaverError, match=message):
        check_preload(GOOD | change, loaded=loaded, cuda="12.8")


def test_library_that_drives_another_binary_is_refused() -> None:
    binary = object.__new__(LibraryBinary)
    opened = SimpleNamespace(
        cdll=SimpleNamespace(_name="/site/torch_memory_saver_hook_mode_torch_cu12.abi3.so")
    )
    binary._library = SimpleNamespace(_impl=SimpleNamespace(_binary_wrapper=opened))
    with pytest.raises(
        SaverError, match=r"drives .*mode_torch_cu12.* but .*mode_preload_cu12.* is preloaded"
    ):
        binary._choose_preloaded(Path(HOOK))
    opened.cdll._name = HOOK
    binary._choose_preloaded(Path(HOOK))


def test_import_needs_neither_torch_nor_the_library() -> None:
    program = (
        "import sys; sys.modules['torch'] = sys.modules['torch_memory_saver'] = None\n"
        "from pitstop_runtime.saver import NullSaver, ParameterCheck, Recomputed, TorchMemorySaver\n"
        "NullSaver().pause(); Recomputed().release(); ParameterCheck(lambda: [])\n"
        "try: TorchMemorySaver(host_budget_bytes=0)\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("SaverError torch_memory_saver cannot be imported")
    assert "pip install 'pitstop[trainer]'" in done.stdout
