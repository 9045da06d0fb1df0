"""The faults. Each is brought about, and returns what became of the run.

A fault that ends in anything but equal bits or a stated end raises :class:`UnexpectedError`.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random

from benchmarks.faults.runs import (
    CHECKPOINT_EVERY,
    EVALUATE_EVERY,
    STEPS,
    Place,
    References,
    Started,
    differences,
    result_of,
    started_by,
    wait_for,
)

EQUAL = "equal to the bit"
RESUMED = "ended; resumed, equal to the bit"
AFTER_REFUSAL = "a second run refused meanwhile; resumed, equal to the bit"
FELL_BACK = "named the damage, resumed from the one before, equal to the bit"
REFUSED = "refused with one line"
SKIPPED = "skipped the step and counted it"
FEWER = "went on with fewer ranks, every step made"

#: Where a rank is when a fault comes.
PHASES = ("start-up", "step", "checkpoint", "evaluation")


class UnexpectedError(Exception):
    """What a fault must not lead to."""


class MissedError(Exception):
    """The run ended before the fault came."""


Fault = Callable[[Place, References, Random], str]


def killed(which: str, phase: str) -> Fault:
    """SIGKILL of one rank or of all; the run is started again."""

    def fault(place: Place, references: References, random: Random) -> str:
        run = place.start()
        ranks = _moment(place, run, phase, random)
        victims = ranks if which == "all" else [random.choice(ranks)]
        for process in victims:
            _signal(process, signal.SIGKILL)
        if run.end() == 0:
            raise MissedError("it had ended before")
        return _finished(place, references, RESUMED)

    return fault


def restarted(phase: str) -> Fault:
    """SIGKILL of one rank under ``torchrun --max-restarts``, which starts all of them again."""

    def fault(place: Place, references: References, random: Random) -> str:
        run = place.start(restarts=2)
        victim = random.choice(_moment(place, run, phase, random))
        _signal(victim, signal.SIGKILL)
        _expect(run.end() == 0, run, "the restarted run failed")
        if victim in [process for process, _, _ in run.ranks().values()]:
            raise MissedError("it had ended before, and was not restarted")
        return _compared(place, references, RESUMED)

    return fault


def torchrun_killed(phase: str) -> Fault:
    """SIGKILL of torchrun alone; its ranks live on, so that a second run is refused meanwhile."""

    def fault(place: Place, references: References, random: Random) -> str:
        run = place.start()
        ranks = _moment(place, run, phase, random)
        os.kill(run.agent.pid or 0, signal.SIGKILL)
        run.agent.join()
        if run.agent.exitcode != -signal.SIGKILL:
            raise MissedError("torchrun had ended before")
        again = place.start()
        refused = again.end() != 0
        if refused:
            _expect_one_line(again, "another process writes into", "is in use", "run_dir:")
        for process in ranks:
            wait_for(lambda process=process: not Path(f"/proc/{process}").exists(), every=0.05)
        return _finished(place, references, AFTER_REFUSAL if refused else RESUMED)

    return fault


def terminated(which: str) -> Fault:
    """SIGTERM to torchrun or to one rank: a checkpoint is written, and the run is resumed."""

    def fault(place: Place, references: References, random: Random) -> str:
        run = place.start()
        ranks = _moment(place, run, "step", random)
        _signal(run.agent.pid if which == "torchrun" else random.choice(ranks), signal.SIGTERM)
        if run.end() == 0 and "finished at step" in run.said:
            raise MissedError("it came in the last two steps, which several ranks still make")
        _expect("stopped by a signal" in run.said, run, "the signal was not heeded")
        return _finished(place, references, RESUMED)

    return fault


def suspended(which: str) -> Fault:
    """SIGSTOP of one rank or of all for a second, then SIGCONT."""

    def fault(place: Place, references: References, random: Random) -> str:
        run = place.start()
        ranks = _moment(place, run, random.choice(PHASES[1:]), random)
        victims = ranks if which == "all" else [random.choice(ranks)]
        for process in victims:
            _signal(process, signal.SIGSTOP)
        time.sleep(1)
        if not all(_is_suspended(process) for process in victims):
            raise MissedError("a rank had ended before")
        for process in victims:
            _signal(process, signal.SIGCONT)
        _expect(run.end() == 0, run, "the run did not survive")
        return _compared(place, references, EQUAL)

    return fault


def disk_full(freed: bool) -> Fault:
    """The disk of the run folder is filled, and freed again while the run goes on, or after it."""

    def fault(place: Place, references: References, random: Random) -> str:
        with _Disk(place) as disk:
            run = place.start()
            step = random.randrange(CHECKPOINT_EVERY + 1, 2 * CHECKPOINT_EVERY)
            _reach(run, "step", step)
            disk.fill()
            if freed:
                wait_for(lambda: "is not written" in run.said or not run.agent.is_alive())
                if "is not written" not in run.said:
                    raise MissedError("nothing was left to write")
                disk.free()
                _expect(run.end() == 0, run, "a full disk ended the run")
                return _compared(place, references, EQUAL)
            _expect(run.end() != 0, run, "a run without room for its results succeeded")
            _expect_one_line(run, "is not written", "cannot be written")
            disk.free()
            return _finished(place, references, RESUMED)

    return fault


def damaged(how: str, count: int = 1) -> Fault:
    """A file of each of the newest checkpoints is changed between two runs."""

    def fault(place: Place, references: References, random: Random) -> str:
        stop = random.randrange(2 * CHECKPOINT_EVERY + 2, STEPS - 2, 2)
        run = place.start(f"stop_after={stop}")
        _expect(run.end() == 0, run, "the run before the damage failed")
        every = place.checkpoints
        for checkpoint in every[-count:] if count else every:
            files = sorted(path for path in checkpoint.iterdir() if path.is_file())
            _damage(random.choice(files), how, random)
        again = place.start()
        if count:
            _expect(again.end() == 0, again, "no other checkpoint was used")
            _expect("instead" in again.said, again, "nothing was said of the damage")
            return _compared(place, references, FELL_BACK)
        _expect(again.end() != 0, again, "a damaged checkpoint was used")
        _expect_one_line(again, "can be used")
        return REFUSED

    return fault


def twice(place: Place, references: References, random: Random) -> str:
    """A second run is started on the folder of one that goes on."""
    run = place.start()
    _reach(run, "step", random.randrange(1, 4))  # the second one takes as long to start
    second = place.start()
    if second.end() == 0 and f"at step {STEPS}" in second.said:
        raise MissedError("the first run had ended before the second one began")
    _expect(second.end() != 0, second, "two runs wrote into one folder")
    _expect_one_line(second, "run_dir:")
    _expect(run.end() == 0, run, "the first run was disturbed")
    return _compared(place, references, EQUAL)


def not_finite(into: str, value: str) -> Fault:
    """A nan or inf in an image, in the gradient of one rank, or in a weight of one rank."""

    def fault(place: Place, references: References, random: Random) -> str:
        rank, step = random.randrange(place.form.ranks), random.randrange(6, STEPS - 4)
        injected = {"into": into, "value": value, "rank": rank, "step": step}
        run = place.start(injected=injected)
        if run.end() == 0:
            rows = result_of(place)["metrics"]
            skips = max(row.get("skipped_steps", 0) for row in rows)
            _expect(place.form.scales and skips >= 1, run, "it went on without a word")
            return SKIPPED
        _expect_one_line(run, "finite", "the loss is", "overflow")
        return _finished(place, references, RESUMED)

    return fault


def lost_for_good(place: Place, references: References, random: Random) -> str:
    """The machine of one rank is lost, and torchrun goes on with the others (``--nnodes 1:N``)."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    marks = place.folder / "marks"
    marks.mkdir(parents=True)
    keys = ("resume.reshard=true", "comm.timeout_seconds=20")
    nodes = [
        place.start_node(endpoint, marks, *keys, hosts=number == 0)
        for number in range(place.form.ranks)
    ]
    first = nodes[0]
    step = random.randrange(CHECKPOINT_EVERY + 1, STEPS - 6)
    _reach(first, "step", step, ranks=place.form.ranks)
    lost = nodes[-1]
    for process in [*started_by(lost.agent.pid or 0), lost.agent.pid or 0]:
        _signal(process, signal.SIGKILL)
    _expect(all(node.end(240) == 0 for node in nodes[:-1]), first, "the others did not go on")
    said = "".join(node.said for node in nodes)
    _expect("a global batch is now" in said, first, "nothing was said of the ranks")
    ours, theirs = result_of(place)["metrics"], references.result(place.form)["metrics"]
    steps = [[(row["split"], row["step"], row["epoch"]) for row in rows] for rows in (ours, theirs)]
    _expect(steps[0] == steps[1], first, "steps were left out or made twice")
    return FEWER


def _moment(place: Place, run: Started, phase: str, random: Random) -> list[int]:
    """Wait until the run is in a phase, and return the processes of its ranks."""
    if phase == "start-up":
        found = wait_for(lambda: _alive(run) and _all_ranks(run, place.form.ranks))
        time.sleep(random.uniform(0, 0.8))
        return found
    if phase == "checkpoint":
        step = random.randrange(CHECKPOINT_EVERY, STEPS + 1, CHECKPOINT_EVERY)
        partial = place.run_dir / "checkpoints" / f".step-{step:08d}.partial"
        wait_for(lambda: _alive(run) and partial.exists())
        time.sleep(random.uniform(0, 0.003))
    elif phase == "evaluation":
        _reach(run, "evaluation", random.randrange(EVALUATE_EVERY, STEPS + 1, EVALUATE_EVERY))
        time.sleep(random.uniform(0, 0.02))
    else:
        _reach(run, "step", random.randrange(1, STEPS + 1))
        time.sleep(random.uniform(0, 0.02))
    return [process for process, _, _ in run.ranks().values()]


def _reach(run: Started, phase: str, step: int, ranks: int = 1) -> None:
    """Wait until a rank is in a phase of a step, or beyond it."""

    def reached() -> bool:
        found = run.ranks().values()
        here = sum(
            at > step or (at == step and now in (phase, "after", "end")) for _, now, at in found
        )
        return here >= ranks

    try:
        wait_for(lambda: reached() or not _alive(run))
    except TimeoutError as error:
        raise UnexpectedError(f"{error}:\n{run.said[-2000:]}") from error


def _alive(run: Started) -> bool:
    if not run.agent.is_alive():
        raise MissedError(run.said[-500:])
    return True


def _all_ranks(run: Started, ranks: int) -> list[int]:
    found = started_by(run.agent.pid or 0)
    return found if len(found) >= ranks else []


def _is_suspended(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False


def _signal(process: int | None, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(process or 0, number)


def _finished(place: Place, references: References, outcome: str) -> str:
    """Start the run again until its end, and compare it with one to which nothing happened."""
    run = place.start()
    _expect(run.end() == 0, run, "the run could not be resumed")
    return _compared(place, references, outcome)


def _compared(place: Place, references: References, outcome: str) -> str:
    found = differences(result_of(place), references.result(place.form))
    if found:
        raise UnexpectedError(f"not equal: {', '.join(found[:5])}")
    return outcome


def _expect(fulfilled: bool, run: Started, what: str) -> None:
    if not fulfilled:
        raise UnexpectedError(f"{what}:\n{run.said[-3000:]}")


def _expect_one_line(run: Started, *texts: str) -> None:
    """Check that a run has said why it ended, without a traceback."""
    errors = {line for line in run.said.splitlines() if "error: " in line}
    _expect("Traceback" not in run.said, run, "a traceback")
    _expect(len(errors) == 1, run, f"{len(errors)} lines of errors")
    _expect(any(text in line for line in errors for text in texts), run, "it did not say why")


def _damage(path: Path, how: str, random: Random) -> None:
    content = bytearray(path.read_bytes())
    if how == "bit":
        content[random.randrange(len(content))] ^= 1 << random.randrange(8)
        path.write_bytes(content)
    elif how == "truncated":
        path.write_bytes(content[: random.randrange(len(content))])
    else:
        path.unlink()


class _Disk:
    """A small disk for the run folder of a place; mounting it needs root."""

    _SIZE = 8_000_000

    def __init__(self, place: Place) -> None:
        self._place, self._at = place, place.folder / "disk"
        self._filler = self._at / "filler"

    def __enter__(self) -> _Disk:
        self._at.mkdir(parents=True)
        options = ["-t", "tmpfs", "-o", f"size={self._SIZE}", "tmpfs", str(self._at)]
        subprocess.run(["mount", *options], check=True)
        self._place.disk = self._at
        return self

    def __exit__(self, *error: object) -> None:
        subprocess.run(["umount", "--lazy", str(self._at)], check=True)

    def fill(self) -> None:
        with suppress(OSError), self._filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))

    def free(self) -> None:
        self._filler.unlink()


def can_mount() -> bool:
    """Whether disks can be made, for those faults that need one."""
    return os.geteuid() == 0 and shutil.which("mount") is not None
