"""Seconds of phases and components on this rank.

The device is synchronised at the ends of phases only. Inside a phase a span is the time that the host was held up;
device work that a component left behind shows in the total and in whatever waits for it next.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

from pitstop.components import Component, Phase

Observer = Callable[[Phase, Component], None]
_PLACE = "pitstop_place"


def place_of(error: BaseException) -> str | None:
    """The component in which an error was raised, None if it was in none."""
    place: str | None = vars(error).get(_PLACE)
    return place


@dataclass(slots=True)
class PhaseSpans:
    """One phase of one switch, in seconds."""

    total_s: float = 0.0
    components_s: dict[Component, float] = field(default_factory=lambda: defaultdict(float))
    overlapped_s: dict[Component, float] = field(default_factory=lambda: defaultdict(float))


class Spans:
    """Collects the spans of one switch; ``observer`` is called as each component begins (for NVTX ranges, say).

    ``now`` is the component that is waited for, or the one that has just raised, for messages.
    """

    def __init__(self, synchronize: Callable[[], None], observer: Observer | None = None) -> None:
        self.phases: dict[Phase, PhaseSpans] = {}
        self.now: tuple[Phase, Component] | None = None
        self._synchronize = synchronize
        self._observer = observer
        self._lock = threading.Lock()

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """Time a phase, from device idle to device idle."""
        self._synchronize()
        start = time.perf_counter()
        spans = self.phases.setdefault(phase, PhaseSpans())
        try:
            yield
            self._synchronize()
        finally:
            spans.total_s += time.perf_counter() - start
            self.now = None

    def component(self, phase: Phase, component: Component) -> AbstractContextManager[None]:
        """Time a component that the phase waits for."""
        return self._timed(phase, component, overlapped=False)

    def overlapped(self, phase: Phase, component: Component) -> AbstractContextManager[None]:
        """Time a component that runs in a thread beside others."""
        return self._timed(phase, component, overlapped=True)

    @contextmanager
    def _timed(self, phase: Phase, component: Component, *, overlapped: bool) -> Iterator[None]:
        start = time.perf_counter()
        if not overlapped:
            self.now = (phase, component)
        try:
            if self._observer is not None:
                self._observer(phase, component)
            yield
        except BaseException as error:
            vars(error).setdefault(_PLACE, f"{phase}/{component}")
            raise
        finally:
            seconds = time.perf_counter() - start
            with self._lock:
                spans = self.phases.setdefault(phase, PhaseSpans())
                (spans.overlapped_s if overlapped else spans.components_s)[component] += seconds
        if not overlapped:
            self.now = None
