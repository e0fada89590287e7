"""What a trainer's export gets: clocks for its components, and a place to confirm what the engine has."""

from __future__ import annotations

from contextlib import AbstractContextManager

from pitstop.components import Component, Phase
from pitstop_runtime.errors import SwitchError
from pitstop_runtime.measure.spans import Spans


class WeightSync:
    """One weight sync."""

    def __init__(self, spans: Spans) -> None:
        self._spans = spans
        self._confirmed = False

    def gather(self) -> AbstractContextManager[None]:
        """Time the gathering of shards into whole tensors."""
        return self._spans.component(Phase.UPDATE_WEIGHTS, Component.WEIGHTS_GATHER)

    def transfer(self) -> AbstractContextManager[None]:
        """Time the hand-over of tensors to the engine."""
        return self._spans.component(Phase.UPDATE_WEIGHTS, Component.WEIGHTS_TRANSFER)

    def load(self) -> AbstractContextManager[None]:
        """Time the engine's loading."""
        return self._spans.component(Phase.UPDATE_WEIGHTS, Component.ENGINE_LOAD)

    def confirm(self, *, sent: object, loaded: object) -> None:
        """Compare what was sent with what the engine says that it loaded: a version, a checksum, or both.

        That a call returned, or how long it took, says nothing of the weights (huggingface/trl#5312).

        Raises:
            SwitchError: they differ.
        """
        if sent != loaded:
            raise SwitchError(
                f"the engine does not have the weights that were sent: sent {sent!r}, it says {loaded!r}. "
                "Samples from it would be off-policy: do not roll out; look at the engine's log."
            )
        self._confirmed = True

    def require_confirmation(self) -> None:
        """Raise unless ``confirm`` was called.

        Raises:
            SwitchError: it was not.
        """
        if not self._confirmed:
            raise SwitchError(
                "the export ended without confirm(), which the settings require: ask the engine for its weight "
                "version or a checksum and pass it to WeightSync.confirm(sent=..., loaded=...)."
            )
