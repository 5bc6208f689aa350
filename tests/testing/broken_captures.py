"""Backends that record what they must refuse, or whose recordings fail unheard."""

from dataclasses import replace
from types import SimpleNamespace

from broken_backends import Sim, caught

from lazykv.backends.sim import SimCapture
from lazykv.errors import LazyKvError, RangeError

OF_ITS_OWN = "test_every_location_records_and_replays_its_own_work"


@caught("capture/test_replay.py", OF_ITS_OWN, "location")
class RecordsOnTheFirstDevice(Sim):
    def capture(self, location, calls):
        return super().capture(self.locations()[0], calls)


@caught("capture/test_replay.py", OF_ITS_OWN, "location")
class ReplaysOnTheFirstDevice(Sim):
    def capture(self, location, calls):
        made = super().capture(location, calls)
        return SimCapture(self.stream(self.locations()[0]), made.work)


class WhileRecording(Sim):
    """Some of what a capture must refuse is done at once."""

    def at_once(self, location, f, *args):
        held = self.stream(location)._thread
        recording, held.recording = getattr(held, "recording", None), None
        try:
            return f(*args)
        finally:
            held.recording = recording


REFUSED = "test_what_the_host_has_a_part_in_is_refused"


@caught("capture/test_refusals.py", f"{REFUSED}[allocate]", "host_has")
class AllocatesWhileRecording(WhileRecording):
    def allocate(self, nbytes, location):
        return self.at_once(location, super().allocate, nbytes, location)


@caught("capture/test_refusals.py", f"{REFUSED}[copy_in]", "host_has")
class CopiesInWhileRecording(WhileRecording):
    def copy_in(self, dest, source):
        self.at_once(dest.location, super().copy_in, dest, source)


@caught("capture/test_refusals.py", f"{REFUSED}[feeder]", "host_has")
class FeedsWhileRecording(WhileRecording):
    def feeder(self, dest):
        return lambda source: self.at_once(dest.location, self.copy_in, dest, source)


@caught("capture/test_refusals.py", f"{REFUSED}[copy_out]", "host_has")
class CopiesOutWhileRecording(WhileRecording):
    def copy_out(self, source):
        return self.at_once(source.location, super().copy_out, source)


@caught("capture/test_refusals.py", f"{REFUSED}[synchronize]", "host_has")
class WaitsWhileRecording(WhileRecording):
    def synchronize(self, location):
        self.at_once(location, super().synchronize, location)


@caught("capture/test_refusals.py", f"{REFUSED}[capture]", "host_has")
class CapturesWhileRecording(WhileRecording):
    def capture(self, location, calls):
        return self.at_once(location, super().capture, location, calls)


@caught("capture/test_refusals.py", f"{REFUSED}[replay]", "host_has")
class ReplaysWhileRecording(Sim):
    def capture(self, location, calls):
        made = super().capture(location, calls)
        made.replay = lambda: made._stream.replay(made.work)
        return made


@caught("capture/test_refusals.py", REFUSED, "host_has")
class RecordsOnAfterARefusal(Sim):
    """What a refused capture had recorded so far is queued."""

    def capture(self, location, calls):
        done = []
        try:
            return super().capture(location, [(self.note, (done, *call)) for call in calls])
        except LazyKvError:
            for f, args in done:
                f(*args)
            raise

    def note(self, done, f, args):
        f(*args)
        done.append((f, args))


@caught("capture/test_refusals.py", "test_other_threads_go_on_while_one_captures", "threads")
class RecordsTheWorkOfAllThreads(Sim):
    """The device records, not the thread."""

    def __init__(self):
        super().__init__()
        for place in self.locations():
            self.stream(place)._thread = SimpleNamespace()


@caught("capture/test_failures.py", "test_a_kernel_that_fails_in_a_replay_is_named", "named")
class FailuresInReplaysNameNoOp(Sim):
    def capture(self, location, calls):
        made = super().capture(location, calls)
        made.work = tuple(replace(w, op=None) for w in made.work)
        return made


NOTHING_ELSEWHERE = "test_a_number_out_of_bounds_in_a_replay_writes_nothing_elsewhere"


class UncheckedCapture(SimCapture):
    """Numbers in memory are not checked in a replay: what is refused goes into other memory."""

    def __init__(self, stream, work, harm):
        super().__init__(stream, [replace(w, run=self.run, args=(w.run, w.args)) for w in work])
        self.harm = harm

    def run(self, f, args):
        try:
            f(*args)
        except RangeError as e:
            self.harm(e)


@caught("capture/test_failures.py", f"{NOTHING_ELSEWHERE}[write_slice_at]", "elsewhere")
class ReplaysWritePastTheirDestination(Sim):
    """Into whatever was allocated next."""

    def __init__(self):
        super().__init__()
        self.memory = []

    def allocate(self, nbytes, location):
        made = super().allocate(nbytes, location)
        self.memory.append(made._data)
        return made

    def capture(self, location, calls):
        return UncheckedCapture(self.stream(location), super().capture(location, calls).work,
                                lambda e: self.memory[-1].fill(0))  # fmt: skip


@caught("capture/test_failures.py", f"{NOTHING_ELSEWHERE}[write_rows]", "elsewhere")
class RefusalsInReplaysAreNotTyped(Sim):
    def capture(self, location, calls):
        def harm(e):
            raise ValueError(str(e))

        return UncheckedCapture(self.stream(location), super().capture(location, calls).work, harm)
