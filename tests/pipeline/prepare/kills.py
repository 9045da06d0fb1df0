"""Kill the preparation of a data set (SIGKILL) at one moment after another, and resume it.

Run as a process of its own: ``python -m tests.pipeline.prepare.kills SOURCE OUT FORMAT STRIDE``,
where STRIDE is 1 for all moments. Prints the last moment. Fails if a resumed data set differs from
an uninterrupted one, or if an incomplete split was in its final place after a kill.
"""

import os
import shutil
import signal
import sys
from pathlib import Path

from largebatch.pipeline import Output, prepare_folder
from largebatch.pipeline.sources import Index


def tree(folder):
    """Return the content of every file of a folder."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


class Killer:
    """Kills this process at a given moment: before or after a lasting change to the disk."""

    def __init__(self, moment):
        self.left = moment

    def __call__(self, *_):
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def around(self, function):
        def wrapped(*arguments, **options):
            self()
            result = function(*arguments, **options)
            self()
            return result

        return wrapped


def forked(function):
    """Run the function in a child process; return whether it was not killed."""
    child = os.fork()
    if child == 0:
        try:
            function()
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return False
    assert os.WEXITSTATUS(status) == 0
    return True


def main(source, folder, form, stride):
    # Data written before a kill are not lost; only a crash of the machine would need a sync.
    os.sync = os.fsync = lambda *_: None
    if form == "links":
        source, output, options = source / "train", Output(workers=1), {"split": 0.25}
    else:
        output, options = Output(form, images_per_shard=4, resize=40, workers=1), {}
    uninterrupted, originals = folder / "uninterrupted", tree(source)
    prepare_folder(uninterrupted, source, output, **options)
    wanted = tree(uninterrupted)

    def work(out, moment):
        killer = Killer(moment)
        for name in ("replace", "rename", "mkdir", "unlink", "link", "fsync"):
            setattr(os, name, killer.around(getattr(os, name)))
        Index.save = killer.around(Index.save)
        prepare_folder(out, source, output, report=killer, **options)

    moment = 1
    while True:
        out = folder / f"killed-{moment}"
        finished = forked(lambda out=out, moment=moment: work(out, moment))
        for split in ("train", "val"):
            if (out / split).exists():  # then it must be complete
                assert tree(out / split) == tree(uninterrupted / split), moment
        # Kill it once more before it may finish.
        forked(lambda out=out, moment=moment: work(out, moment // 2 + 1))
        prepare_folder(out, source, output, **options)
        assert tree(out) == wanted, moment
        assert tree(source) == originals, moment
        shutil.rmtree(out)
        if finished:
            break
        moment += stride
    print(moment)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
