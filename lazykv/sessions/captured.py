"""CapturedDecodeSession: a held session whose plan the device replays as one recording.

Positions and lengths must be read from memory by the kernels (`write_slice_at`, attention with a
length in a tensor, pages): what only the host knows would be frozen into the recording.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from lazykv.device import HostArray
from lazykv.errors import CaptureError, OutOfMemory
from lazykv.sessions.decode import DecodeSession
from lazykv.symbols import EnvLike

RETIRED = "capture: got a session that was retired, need one that is still held; build another"


class CapturedDecodeSession(DecodeSession):
    """A `DecodeSession` that runs `warmup` steps plainly, captures its plan, and then replays.

    Results are bit for bit those of plain steps. Inputs are copied to their fixed places before
    each replay. The recording ends when the session is re-bound, retired, or its plan binds other
    memory; after a re-bind it warms up and captures again. Where the plan or its backend cannot be
    captured, or memory for its results is short, `reason` says why and steps run plainly.

    A session is retired when it is let go: by a context that drops it, holds another one instead or
    is cleared, and by a cache whose storage is replaced. It may still be used and re-bound, but it
    never captures again. Taking it out of a context does not retire it.
    """

    warmup: ClassVar[int] = 1
    """Plain steps before a capture: kernels are compiled and memory is taken in them."""

    captures: int = 0
    replays: int = 0
    _plain: int = 0
    _refused: str | None = None
    _short_of_memory: bool = False
    _retired: bool = False

    @property
    def captured(self) -> bool:
        """Whether the next step is a replay."""
        return self.plan.captured

    @property
    def reason(self) -> str | None:
        """Why steps run plainly; None while they are replays, or warm up for a capture."""
        return RETIRED if self._retired else self._refused

    def step(self, data: Mapping[str, Any], env: EnvLike = None) -> HostArray:
        out = super().step(data, env)
        if self.captured:
            self.replays += 1
        else:
            self._plain += 1
        return out

    def _before_pass(self) -> None:
        if self.captured or self.reason is not None or self._plain < self.warmup:
            return
        try:
            self.plan.record()
        except (CaptureError, OutOfMemory) as e:
            self._refused = str(e)
            self._short_of_memory = isinstance(e, OutOfMemory)
            self.history.append(("not captured", self._refused))
        else:
            self.captures += 1
            self.history.append(("captured", self.alloc_id))
            if self._retired:  # meanwhile, by another thread
                self.plan.drop_capture()

    def _before_rebind(self) -> None:
        """The recording is retired first, also if the re-bind is refused then."""
        self.plan.drop_capture()
        self._plain = 0
        if self._short_of_memory:
            self._refused, self._short_of_memory = None, False

    def retire(self) -> None:
        self._retired = True
        super().retire()
