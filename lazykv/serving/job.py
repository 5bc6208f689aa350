"""A request as the engine works on it."""

from lazykv.models.generate import Reply
from lazykv.serving.policy import RequestView
from lazykv.serving.request import Request
from lazykv.serving.rows import Rows


class Job:
    """A request, what chooses its tokens, and its rows.

    `tokens` are the prompt and all that was generated; the last one has no row until a step has
    run it. `failures` counts steps that failed since it last got on.
    """

    def __init__(self, request: Request, reply: Reply, rows: Rows) -> None:
        self.request = request
        self.reply = reply
        self.rows = rows
        self.tokens = list(request.prompt)
        self.failures = 0
        # Tokens that are there before any is chosen; after a recomputation, generated ones too.
        self._given = 0

    @property
    def left(self) -> int:
        """Tokens without a row: 1 when the next step is to give a new token."""
        return len(self.tokens) - self.rows.filled

    @property
    def needed(self) -> int:
        """Blocks to take until the next token is chosen."""
        return self.rows.needed(self.left)

    def begin(self) -> int:
        """Start on all tokens at once; returns how many of them the prefix index had."""
        self._given = len(self.tokens)
        return self.rows.begin(self.tokens)

    def advanced(self, n: int) -> int:
        """Note that the last n rows are there; returns how many of them were prefill."""
        self.failures = 0
        self.rows.unpin()
        filled = self.rows.filled
        prefilled = max(0, min(filled, self._given) - (filled - n))
        if prefilled:
            self.request.prefill_tokens += prefilled
            self.rows.publish(self.tokens)
        return prefilled

    def close(self) -> None:
        """Give up all rows; full blocks stay findable by their tokens."""
        if self.rows.there:
            self.rows.publish(self.tokens)
        self.rows.drop()

    def forget(self) -> None:
        """Give up all rows for now: they are computed again when the job is next admitted."""
        self.request.recomputations += self.rows.there
        self.close()

    def view(self) -> RequestView:
        rows, prompt = self.rows, len(self.request.prompt)
        return RequestView(
            id=self.request.id,
            prompt_tokens=prompt,
            new_tokens=len(self.tokens) - prompt,
            rows=rows.filled,
            blocks_held=rows.held,
            blocks_needed=self.needed,
        )
