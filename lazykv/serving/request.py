"""What an embedder holds of a request, and the pieces it streams."""

from collections.abc import Callable, Iterator
from enum import Enum
from typing import Self

from lazykv.ids import RequestId
from lazykv.models.generate import Piece


class RequestState(Enum):
    """Where a request is. The last three are final."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"
    CANCELLED = "cancelled"
    FAILED = "failed"


_ENDS = (RequestState.FINISHED, RequestState.CANCELLED, RequestState.FAILED)


class Request:
    """One prompt and what follows it. `Engine.submit` makes it, and only the engine changes it.

    `prompt` are its token ids. `pieces` are what has been generated so far, one `Piece` a token.
    `finish_reason` is None until it has ended, then ``"stop"``, ``"length"``, ``"capacity"`` (no
    row is left for it), ``"cancelled"`` or ``"error"``. `error` is what a failed one died of, or an
    `OutOfBlocks` where a row was lacking because others hold blocks of the pool.

    Counters: `prefill_tokens` that were computed before a token could be chosen, `tokens_found` in
    the prefix index instead, `preemptions`, and `recomputations`, after which its rows had to be
    computed again.
    """

    def __init__(
        self, id: RequestId, prompt: tuple[int, ...], drive: Callable[["Request", int], None]
    ) -> None:
        self.id = id
        self.prompt = prompt
        self.pieces: list[Piece] = []
        self.state = RequestState.WAITING
        self.finish_reason: str | None = None
        self.error: Exception | None = None
        self.prefill_tokens = 0
        self.tokens_found = 0
        self.preemptions = 0
        self.recomputations = 0
        self.cancel_asked = False
        self._drive = drive

    @property
    def tokens(self) -> list[int]:
        """Ids generated so far."""
        return [piece.id for piece in self.pieces]

    @property
    def text(self) -> str:
        """Text generated so far. What may be half a character or begin a stop string is held back
        until it is not, or until the token that is the last; an end without one lets nothing out.
        """
        return "".join(self.pieces)

    @property
    def ended(self) -> bool:
        return self.state in _ENDS

    def cancel(self) -> None:
        """End it when the next round begins; nothing happens if it has ended. From any thread."""
        self.cancel_asked = True

    def stream(self) -> Iterator[Piece]:
        """Yield every piece from the first on, until the request has ended; raises the error of one
        that failed. From any thread.

        Where no piece is ready the stream runs a round of the engine itself, or waits for the round
        that another thread is running. So streams alone keep an engine going.
        """
        given = 0
        while True:
            ended = self.ended  # asked first: an ended request gets no more pieces
            for piece in self.pieces[given:]:
                given += 1
                yield piece
            if ended:
                break
            self._drive(self, given)
        if self.error is not None:
            raise self.error

    def __copy__(self) -> Self:
        return self  # a handle: a second object would not be told what the engine does

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def __repr__(self) -> str:
        n = len(self.pieces)
        return f"Request({int(self.id)}, {self.state.value}, {len(self.prompt)} + {n} tokens)"
