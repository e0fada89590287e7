"""Weights gathered without a communicator: ranks map a buffer of each other's and copy from it.

A communicator that stays alive for the weight gather holds memory through the rollout, and with few channels it
is slow. On one node neither is needed: what a rank has to send it copies into a buffer that its peers have mapped
(CUDA IPC), and they copy from there. The buffers exist during a weight sync only. A gloo group says when a part
of a buffer may be read; each part has one meeting, since two halves of a buffer take turns: who comes to a
meeting has finished reading the half before last.

``PeerCopies`` stands where an export communicator would. It carries what exports use (``all_gather`` in its
forms, ``broadcast``, ``all_reduce`` of small tensors, ``barrier``); anything else raises a typed error.
"""

from __future__ import annotations

import pickle
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroup

from pitstop_runtime.errors import SwitchError, UnsupportedDispositionError, first_line
from pitstop_runtime.groups.communicator import (
    Communicator,
    CommunicatorState,
    Library,
    build_group,
    forget_coalescing,
)
from pitstop_runtime.groups.peer_memory import SharedBuffer, device_uuid, has_access, local_index

HALF_BYTES = 32 * 1024**2
"""Bytes of one half of a rank's buffer: long copies, and twice this is all that a sync takes."""

_POLL_S = 20e-6
_REDUCTIONS: dict[Any, Callable[[Tensor], Tensor]] = {
    dist.ReduceOp.SUM: lambda parts: parts.sum(dim=0),
    dist.ReduceOp.AVG: lambda parts: parts.mean(dim=0),
    dist.ReduceOp.MAX: lambda parts: parts.amax(dim=0),
    dist.ReduceOp.MIN: lambda parts: parts.amin(dim=0),
}


class PeerCopies(Communicator):
    """What an export communicator is to its handles, without memory of its own between weight syncs."""

    _meeting: ProcessGroup | None = None
    _gathering: _Gathering | None = None
    _opened = 0

    @property
    def inner(self) -> Any:
        """What carries the collectives while open.

        Raises:
            RuntimeError: it is not open.
        """
        if self._gathering is None:
            raise RuntimeError(f"{self} is not open: weights are gathered inside update_weights()")
        return self._gathering

    @property
    def ready(self) -> bool:
        """Whether collectives can run: while open."""
        return self._gathering is not None and self.state is CommunicatorState.LIVE

    @property
    def used(self) -> bool:
        """Whether device memory is held."""
        return self._gathering is not None

    def memory_bytes(self) -> int | None:
        """No communicator, no memory; the buffers are the allocator's."""
        return 0

    def build(self) -> None:
        """Make the group in which the ranks meet, and see whether they can map each other's memory.

        Raises:
            UnsupportedDispositionError: they cannot: another node, another view of the devices, or no peer access.
            SwitchError: the ranks did not meet.
        """
        if self.state is CommunicatorState.LIVE:
            return
        self.release()
        meeting = self._rendezvous
        self._build_store = PrefixStore(meeting.prefix(self.name), self._store)
        try:
            self._meeting = build_group(
                Library.GLOO,
                self._build_store,
                self.ranks,
                self.rank,
                self.options,
                None,
                self.name,
                meeting.limit_s,
            )
        except RuntimeError as error:
            raise SwitchError(f"{self} could not be built: {first_line(error)}") from error
        try:
            self._places = self._exchange("place", (socket.gethostname(), device_uuid()))
            self._settle("peers", self._unreachable())
        except RuntimeError:
            self._enter(CommunicatorState.BROKEN)  # the others are not waited for
            self.release()
            raise
        self._opened = 0
        self._enter(CommunicatorState.LIVE)

    def open(self) -> None:
        """Make this rank's buffer and map the others'; all members call it, outside of the saver's memory.

        Raises:
            UnsupportedDispositionError: a buffer cannot be made or mapped, on whichever rank.
        """
        if self._gathering is not None or self._meeting is None:
            return
        self._opened += 1
        shared, problem = self._make_buffer()
        try:
            offers = self._exchange(f"buffer/{self._opened}", shared.offers if shared else None)
            peers: list[Tensor] = []
            if shared is not None and None not in offers:
                peers, problem = self._map(shared, offers)
            self._settle(f"mapped/{self._opened}", problem)
        finally:
            if shared is not None:
                shared.publish_no_more()
        assert shared is not None  # or there was a problem
        self._gathering = _Gathering(self, self._meeting, shared, peers)
        self._follow()

    def _make_buffer(self) -> tuple[SharedBuffer | None, str]:
        """This rank's buffer, or what is in the way of it: the others have to be told, for they wait for it."""
        try:
            return SharedBuffer.make(self.library, 2 * HALF_BYTES, len(self.ranks), self.rank), ""
        except RuntimeError as error:
            return None, f"rank {self.ranks[self.rank]} cannot make a buffer: {first_line(error)}"

    def _map(self, shared: SharedBuffer, offers: list[Any]) -> tuple[list[Tensor], str]:
        """The buffers of all ranks, and what is in the way."""
        peers = []
        for rank, (offered, (_, device)) in enumerate(zip(offers, self._places, strict=True)):
            try:
                peers.append(
                    shared.buffer if rank == self.rank else SharedBuffer.map(offered[self.rank], device)
                )
            except RuntimeError as error:
                me, other = self.ranks[self.rank], self.ranks[rank]
                return [], f"rank {me} cannot map the buffer of rank {other}: {first_line(error)}"
        return peers, ""

    def close(self) -> None:
        """Give the buffers back: the others' first, then, when all have, one's own."""
        gathering, self._gathering = self._gathering, None
        self._follow()
        if gathering is not None:
            gathering.close(meet=self.state is CommunicatorState.LIVE)

    def release(self) -> None:
        """End; does nothing if there is nothing."""
        meeting, self._meeting = self._meeting, None
        broken = self.state is CommunicatorState.BROKEN
        self.state = CommunicatorState.BROKEN  # nobody may be waited for any more
        self.close()
        self._enter(CommunicatorState.RELEASED)
        if meeting is not None and not broken:
            meeting.shutdown()

    def abort(self) -> None:
        """Let nobody wait in a meeting any longer."""
        if self.state is CommunicatorState.LIVE:
            self._enter(CommunicatorState.BROKEN)

    def _exchange(self, key: str, value: object) -> list[Any]:
        store = self._build_store
        store.set(f"{key}/{self.rank}", pickle.dumps(value).hex())
        return [pickle.loads(bytes.fromhex(store.get(f"{key}/{r}").decode())) for r in range(len(self.ranks))]

    def _settle(self, what: str, problem: str) -> None:
        """Raise on all ranks if one of them has a problem, so that none waits for it."""
        problems = self._exchange(what, problem)
        if found := next(filter(None, problems), None):
            raise UnsupportedDispositionError(f"{self}: weights cannot be copied: {found}. {_REMEDY}")

    def _unreachable(self) -> str:
        host, _ = self._places[self.rank]
        for rank, (other, device) in zip(self.ranks, self._places, strict=True):
            me = self.ranks[self.rank]
            if other != host:
                return f"rank {rank} is on {other}, rank {me} on {host}"
            if device is not None and local_index(device) is None:
                return f"rank {me} does not see the GPU of rank {rank} ({device})"
            if device is not None and not has_access(device):
                return f"rank {me} has no peer access to the GPU of rank {rank} ({device})"
        return ""


_REMEDY = (
    "Let all ranks of a node see all its GPUs (CUDA_VISIBLE_DEVICES), or use a plan that gathers weights over "
    "communicators (export: communicator, or training)."
)


class _Gathering:
    """The collectives, over mapped buffers. Arguments and results are those of torch's process groups."""

    def __init__(
        self, owner: PeerCopies, meeting: ProcessGroup, shared: SharedBuffer, peers: list[Tensor]
    ) -> None:
        self._owner, self._meeting, self._shared = owner, meeting, shared
        self._halves = [peer.split(HALF_BYTES) for peer in peers]
        self._rank, self._size = owner.rank, len(owner.ranks)
        self._on_device = shared.buffer.is_cuda
        self._parts = 0

    def size(self) -> int:
        """Number of ranks."""
        return self._size

    def rank(self) -> int:
        """Number of this rank in the group."""
        return self._rank

    def barrier(self, opts: object = None) -> _Done:
        """Wait for all ranks."""
        del opts
        self._meet()
        return _Done()

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: object = None) -> _Done:
        """Gather tensors, of different sizes if need be, into a list per input."""
        del opts
        for into, mine in zip(outputs, inputs, strict=True):
            self._gather(into, mine)
        return _Done(outputs[0] if outputs else [])

    def _allgather_base(self, output: Tensor, source: Tensor, opts: object = None) -> _Done:
        del opts
        flat = output.contiguous()
        self._gather(flat.view(-1).chunk(self._size), source)
        if flat is not output:
            output.copy_(flat)
        return _Done([output])

    def allgather_into_tensor_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: object = None
    ) -> _Done:
        """Gather several tensors."""
        del opts
        for output, source in zip(outputs, inputs, strict=True):
            self._allgather_base(output, source)
        return _Done(outputs)

    # As torch 2.14 calls them.
    all_gather_single = _allgather_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced

    def broadcast(self, tensors: list[Tensor], opts: Any) -> _Done:
        """Send tensors of one rank to all."""
        root = opts.rootRank
        for tensor in tensors:
            self._copy({root: tensor}, tensor if self._rank == root else None)
        return _Done(tensors)

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> _Done:
        """Reduce, in the order of ranks; gathers everything, so for small tensors."""
        operation = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        reduction = next((f for op, f in _REDUCTIONS.items() if operation == op), None)
        if reduction is None:
            raise UnsupportedDispositionError(f"{self._owner}: all_reduce with {operation}. {_REMEDY}")
        for tensor in tensors:
            parts = torch.empty((self._size, *tensor.shape), dtype=tensor.dtype, device=tensor.device)
            self._gather(list(parts.unbind()), tensor)
            tensor.copy_(reduction(parts))
        return _Done(tensors)

    def close(self, *, meet: bool) -> None:
        """Let go of the others' buffers, wait until they have let go of this one, and free it."""
        self._halves = []
        self._synchronize()
        try:
            if meet:
                self._meet()
        finally:
            del self._shared
            if self._on_device:
                torch.cuda.ipc_collect()
                torch.cuda.empty_cache()  # torch keeps what is freed, and the engine shall have it

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        for handle in self._owner.handles:
            forget_coalescing(handle)
        raise UnsupportedDispositionError(
            f"{self._owner}: {name} cannot be carried by copies; all_gather, broadcast, all_reduce and barrier can. "
            "Use a plan that gathers weights over communicators (export: communicator, or training)."
        )

    def _gather(self, outputs: Sequence[Tensor], mine: Tensor) -> None:
        if len(outputs) != self._size or outputs[self._rank].nbytes != mine.nbytes:
            raise ValueError(
                f"{self._owner}: {len(outputs)} outputs, this rank's of {outputs[self._rank].nbytes} bytes, "
                f"for {self._size} ranks and an input of {mine.nbytes} bytes"
            )
        self._copy(dict(enumerate(outputs)), mine)

    def _copy(self, targets: dict[int, Tensor], mine: Tensor | None) -> None:
        """Send ``mine`` (None: nothing) and fill the targets, by the rank that each comes from."""
        source = None if mine is None else _bytes_of(mine.contiguous())
        into = {rank: _bytes_of(target) for rank, target in targets.items() if target.is_contiguous()}
        odd = {rank: torch.empty_like(t).contiguous() for rank, t in targets.items() if rank not in into}
        into |= {rank: _bytes_of(target) for rank, target in odd.items()}
        # Each rank begins with its neighbour, so that not all read from one GPU at the same time.
        order = [(self._rank + shift) % self._size for shift in range(1, self._size)]
        for start in range(0, max((t.numel() for t in into.values()), default=0), HALF_BYTES):
            half = self._parts % 2
            self._parts += 1
            if source is not None:
                piece = source[start : start + HALF_BYTES]
                self._halves[self._rank][half][: piece.numel()].copy_(piece, non_blocking=True)
            self._synchronize()
            self._meet()
            for rank in order:
                if rank in into:
                    target = into[rank][start : start + HALF_BYTES]
                    target.copy_(self._halves[rank][half][: target.numel()], non_blocking=True)
        if source is not None and self._rank in into and into[self._rank].data_ptr() != source.data_ptr():
            into[self._rank].copy_(source, non_blocking=True)
        for rank, target in odd.items():
            targets[rank].copy_(target)

    def _synchronize(self) -> None:
        if self._on_device:
            torch.cuda.current_stream().synchronize()

    def _meet(self) -> None:
        work = self._meeting.barrier()
        while not work.is_completed():
            if self._owner.state is not CommunicatorState.LIVE:
                raise SwitchError(f"{self._owner}: the weight sync was broken off")
            time.sleep(_POLL_S)
        try:
            work.wait()
        except RuntimeError as error:
            raise SwitchError(
                f"{self._owner}: another rank did not come to the weight sync: {first_line(error)}"
            ) from error


class _Done(dist.Work):
    """A collective that has been issued: copies follow the current stream like any kernel."""

    def __init__(self, result: list[Tensor] | None = None) -> None:
        super().__init__()
        self._result = result or []

    def wait(self, timeout: Any = None) -> bool:
        del timeout
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def result(self) -> list[Tensor]:
        return self._result

    def get_future(self) -> torch.futures.Future[Any]:
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self._result)
        return future


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)
