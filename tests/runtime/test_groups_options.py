"""Every option that a group was made with survives a rebuild: NCCL's, the time limit, the bound device, the names."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from group_world import TIMEOUT, Way, World
from rank_server import on_ranks

from pitstop_runtime.errors import UnsupportedDispositionError
from pitstop_runtime.groups import Communicator, Library, Wiring, registry, release
from pitstop_runtime.groups.communicator import Rendezvous
from pitstop_runtime.groups.options import GroupOptions

pytestmark = pytest.mark.megatron

UNSET = -(2**31)  # what NCCL takes for "not given"
HOUR = timedelta(hours=1)
LIMIT_S = 2.0


class _Data:
    """Attributes that are properties of the class, as those of torch's option objects are."""

    defaults: dict[str, Any]

    def __init__(self) -> None:
        self._values = dict(self.defaults)

    def __init_subclass__(cls) -> None:
        for name in cls.defaults:

            def read(self: _Data, name: str = name) -> Any:
                return self._values[name]

            def write(self: _Data, value: Any, name: str = name) -> None:
                if value is None:
                    raise TypeError("incompatible function arguments")  # as pybind11 for a text
                self._values[name] = value

            setattr(cls, name, property(read, write))


class StandInConfig(_Data):
    """The fields of ``ncclConfig_t`` that torch 2.14 knows."""

    defaults = {  # noqa: RUF012
        "blocking": UNSET,
        "cga_cluster_size": UNSET,
        "collnet_enable": UNSET,
        "comm_name": None,
        "cta_policy": UNSET,
        "max_ctas": UNSET,
        "max_p2p_peers": UNSET,
        "min_ctas": UNSET,
        "net_name": None,
        "nvls_ctas": UNSET,
        "split_share": UNSET,
        "traffic_class": UNSET,
    }


class StandInOptions(_Data):
    """``ProcessGroupNCCL.Options`` for builds of torch that have no NCCL."""

    defaults = {  # noqa: RUF012
        "_timeout": timedelta(minutes=10),
        "backend": "nccl",
        "config": None,
        "enable_reconfigure": False,
        "global_ranks_in_group": [],
        "group_name": "",
        "is_high_priority_stream": False,
        "split_color": 0,
        "split_from": None,
    }

    def __init__(self) -> None:
        super().__init__()
        self._values["config"] = StandInConfig()


class StandInBackend:
    """Makes options; not a communicator."""

    Options = StandInOptions


@pytest.fixture(params=["torch", "stand-in"])
def nccl_options(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> type[Any]:
    """The class of NCCL's options: torch's own, where this build has it, and one with the same fields."""
    if request.param == "stand-in":
        monkeypatch.setattr(dist, "ProcessGroupNCCL", StandInBackend, raising=False)
    elif not dist.is_nccl_available():
        pytest.skip("this build of torch has no NCCL")
    options: type[Any] = dist.ProcessGroupNCCL.Options
    return options


def fields(options: Any) -> dict[str, Any]:
    """All plain attributes."""
    names = (name for name in dir(type(options)) if isinstance(getattr(type(options), name), property))
    return {name: getattr(options, name) for name in names}


def given(options_type: type[Any]) -> Any:
    """Options with something in every field that torch lets a trainer set."""
    options = options_type()
    options.is_high_priority_stream = True
    for number, name in enumerate(sorted(fields(options.config)), start=1):
        is_text = getattr(options.config, name) is None
        setattr(options.config, name, "Socket" if is_text else number % 2 if number != 6 else number)
    options.config.max_ctas, options.config.min_ctas = 16, 2
    return options


def test_every_field_of_the_options_is_handed_on(nccl_options: type[Any]) -> None:
    options = given(nccl_options)
    before, config = fields(options), fields(options.config)
    made = GroupOptions(HOUR, options).nccl((4, 5), "7", None)
    assert made is not options
    assert fields(made.config) == config
    assert made._timeout == HOUR
    assert list(made.global_ranks_in_group) == [4, 5]
    assert made.group_name == "7"
    assert made.is_high_priority_stream
    for name in before.keys() - {"config", "_timeout", "global_ranks_in_group", "group_name", "split_from"}:
        assert getattr(made, name) == before[name], name


def test_options_that_were_given_are_never_changed(nccl_options: type[Any]) -> None:
    options = given(nccl_options)
    before, config = fields(options), fields(options.config)
    del before["config"]
    GroupOptions(HOUR, options).nccl((4, 5), "7", max_ctas=1)
    after = fields(options)
    del after["config"]
    assert after == before
    assert fields(options.config) == config


def test_no_options_are_torchs_default_ones(nccl_options: type[Any]) -> None:
    made, default = GroupOptions(HOUR).nccl((0, 1), "1", None), nccl_options()
    assert fields(made.config) == fields(default.config)
    assert made.is_high_priority_stream is default.is_high_priority_stream is False


@pytest.mark.parametrize(
    ("own", "cap", "expected"),
    [
        ((None, None), None, (UNSET, UNSET)),
        ((None, None), 4, (4, 1)),  # NCCL refuses a cap below the least number, which it has set
        ((16, 2), 4, (4, 2)),
        ((16, 8), 4, (4, 4)),
        ((2, 1), 4, (2, 1)),  # the trainer's own cap is lower
        ((2, None), 4, (2, 1)),
    ],
)
def test_channel_caps(
    nccl_options: type[Any], own: tuple[Any, Any], cap: int | None, expected: tuple[int, int]
) -> None:
    options = nccl_options()
    for name, value in zip(("max_ctas", "min_ctas"), own, strict=True):
        if value is not None:
            setattr(options.config, name, value)
    made = GroupOptions(HOUR, options).nccl((0, 1), "1", cap)
    assert (made.config.max_ctas, made.config.min_ctas) == expected


def test_groups_share_only_with_equal_options(nccl_options: type[Any]) -> None:
    def key(**config: Any) -> Any:
        options = nccl_options()
        for name, value in config.items():
            setattr(options if name.startswith("is_") else options.config, name, value)
        return GroupOptions(HOUR, options).key

    assert key() == key()
    assert key(max_ctas=4) == key(max_ctas=4)
    different = [
        key(),
        key(max_ctas=4),
        key(max_ctas=8),
        key(net_name="IB"),
        key(is_high_priority_stream=True),
        key(cga_cluster_size=2),
        GroupOptions(HOUR).key,
        GroupOptions(2 * HOUR).key,
    ]
    assert len(set(different)) == len(different)
    # What belongs to one group only is no difference.
    named, unnamed = nccl_options(), nccl_options()
    named.group_name, named.global_ranks_in_group = "3", [0, 1]
    assert GroupOptions(HOUR, named).key == GroupOptions(HOUR, unnamed).key


def test_a_communicator_that_shares_its_resources_is_not_suspended(
    nccl_options: type[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = nccl_options()
    assert not GroupOptions(HOUR, options).split_share
    options.config.split_share = 1
    shared = GroupOptions(HOUR, options)
    communicator = Communicator("1", Library.NCCL, dist.HashStore(), (0, 1), 0, shared, None, Rendezvous())
    monkeypatch.setattr(Communicator, "used", True)
    communicator.state = communicator.state.LIVE
    with pytest.raises(UnsupportedDispositionError, match="split_share"):
        communicator.suspend()


# On ranks.


def limits_of(group: Any) -> list[float]:
    """What the backend and the handle say, in seconds."""
    backend = group._live._get_backend(torch.device("cpu"))
    return [backend.options._timeout.total_seconds(), group.options.timeout.total_seconds()]


def case_time_limits() -> dict[str, Any]:
    # Limits hold for building too: long ones, for a machine that is busy.
    everyone, seconds = list(range(dist.get_world_size())), timedelta(seconds=10)
    world = World(Way.FRESH)
    group = dist.new_group(everyone, 7 * seconds)
    found = {"made": limits_of(group)}
    world.rebuild()
    found["rebuilt"] = limits_of(group)
    group._get_backend(torch.device("cpu"))._set_default_timeout(9 * seconds)  # as torch did up to 2.13
    world.rebuild()
    found["set on the backend"] = limits_of(group)
    group.set_timeout(11 * seconds)
    found["set on the group"] = limits_of(group)
    world.rebuild()
    found["set on the group, rebuilt"] = limits_of(group)
    release(registry.communicators())
    group.set_timeout(13 * seconds)
    world.agree()
    group.communicator.build()
    found["set while released"] = limits_of(group)
    dist.distributed_c10d._set_pg_timeout(15 * seconds, group)
    world.rebuild()
    found["set by torch"] = limits_of(group)
    return found


def test_a_time_limit_survives_rebuilds() -> None:
    for found in on_ranks(case_time_limits, 2):
        expected = dict(zip(found, (70, 70, 90, 110, 110, 130, 150), strict=True))
        assert found == {what: [seconds, seconds] for what, seconds in expected.items()}


def case_shared_time_limit() -> list[Any]:
    """A limit that is set on one of two groups that share holds for both: they go on sharing."""
    world = World(Way.SHARED)
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=90), world.twin)
    world.rebuild()
    found = [limits_of(world.whole), limits_of(world.twin)]
    registry.rewire(Wiring(share=True, cold_max_ctas=1))
    return [*found, world.whole.communicator is world.twin.communicator]


def test_a_time_limit_of_a_shared_communicator_holds_for_all_its_groups() -> None:
    assert on_ranks(case_shared_time_limit, 2) == [[[90.0, 90.0], [90.0, 90.0], True]] * 2


def case_time_out() -> float:
    """Wait for what nobody sends, after a rebuild."""
    world = World(Way.FRESH)
    world.whole.set_timeout(timedelta(seconds=LIMIT_S))
    world.rebuild()
    begun = time.monotonic()
    if world.rank == 0:
        with pytest.raises(RuntimeError, match=r"(?i)time"):
            dist.recv(torch.zeros(1), group=world.whole, group_src=1)
    world.agree()
    return time.monotonic() - begun


def test_a_rebuilt_communicator_keeps_to_the_time_limit() -> None:
    assert all(LIMIT_S / 2 < seconds < TIMEOUT.total_seconds() / 2 for seconds in on_ranks(case_time_out, 2))


def case_slow_message() -> float:
    """A message that comes later than the limit for meeting."""
    world = World(Way.FRESH)
    registry.rendezvous.limit_s = LIMIT_S
    world.rebuild()
    tensor = torch.ones(1)
    if world.rank == 1:
        time.sleep(LIMIT_S * 1.3)
        dist.send(tensor * 7, group=world.whole, group_dst=0)
    else:
        dist.recv(tensor, group=world.whole, group_src=1)
    return float(tensor)


def test_a_limit_for_meeting_is_none_for_messages() -> None:
    assert on_ranks(case_slow_message, 2) == [7.0, 1.0]


def case_bound_device() -> list[Any]:
    """Torch binds a device by asking for its backend; gloo takes no device, so that only the note of it is seen."""
    world = World(Way.FRESH)
    group = world.whole
    before = group.bound_device_id
    with pytest.raises(RuntimeError):
        group._get_backend(torch.device("cuda", 3))
    group._get_backend(torch.device("cpu"))
    world.rebuild()
    inner = group._live
    return [before, group.bound_device_id, str(inner.bound_device_id), str(world.twin._live.bound_device_id)]


def test_a_bound_device_survives_rebuilds() -> None:
    assert on_ranks(case_bound_device, 2) == [[None, None, "cuda:3", "None"]] * 2


def case_names() -> list[Any]:
    world = World(Way.FRESH)
    seen = []
    for _ in range(2):
        seen.append([world.whole.group_name, world.whole.group_desc, dist.get_backend(world.whole)])
        world.rebuild()
    release([world.whole.communicator])
    seen.append([world.whole.group_name, world.whole.group_desc, dist.get_backend(world.whole)])
    return [all(each == seen[0] for each in seen), *seen[0][1:]]


def test_names_and_descriptions_survive_rebuilds() -> None:
    assert on_ranks(case_names, 2) == [[True, "TENSOR_MODEL_PARALLEL_GROUP", "pitstop"]] * 2
