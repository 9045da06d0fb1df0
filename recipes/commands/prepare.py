"""The commands ``largebatch data prepare``, one per data set."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

if TYPE_CHECKING:
    from ...pipeline import Output, ProgressCallback


class _DataSets(TyperGroup):
    """A group with a command for each data set; reports an unknown one in one line."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        from ..errors import RecipeError, exit_on_user_error

        if args and args[0] not in self.commands:
            with exit_on_user_error():
                valid = ", ".join(self.commands)
                raise RecipeError(f"unknown data set {args[0]!r}; valid: {valid}")
        return super().resolve_command(ctx, args)


prepare_app = typer.Typer(
    cls=_DataSets,
    help=(
        "Write a data set as class folders or as shards.\n\n"
        "Folders are DIR/train/CLASS/ and DIR/val/CLASS/; shards lie in DIR/train and DIR/val, "
        "with an index.\n\n"
        "If the command is killed, run it again: it continues where it stopped, and the result is "
        "the same bit for bit. A complete data set is left as it is. Images keep their bytes, "
        "unless --resize makes them smaller."
    ),
    no_args_is_help=True,
    rich_markup_mode=None,
)

_Out = Annotated[Path, typer.Option(metavar="DIR", help="Folder to create.")]
_Format = Annotated[
    str,
    typer.Option(
        "--format",
        metavar="FORMAT",
        help="folder, or webdataset: tar shards with an index of theirs and the .idx files of "
        "DALI.",
    ),
]
_ShardBytes = Annotated[
    str, typer.Option(metavar="SIZE", help="Approximate size of a shard: 256MiB, 1GB, or bytes.")
]
_ImagesPerShard = Annotated[
    int | None, typer.Option(metavar="N", help="Images per shard, in place of --shard-bytes.")
]
_Resize = Annotated[
    int | None,
    typer.Option(
        metavar="PIXELS",
        help="Shrink images whose shorter side is longer than this, and encode them as JPEG.",
    ),
]
_Quality = Annotated[int, typer.Option(help="JPEG quality of images that are encoded, 1 to 100.")]
_Seed = Annotated[
    int,
    typer.Option(
        help="Seed of --split, and of the order of training images in shards, which is random so "
        "that programs that read from front to back see all classes mixed."
    ),
]
_Workers = Annotated[int | None, typer.Option(help="Number of threads; default: one per core.")]
_Checksum = Annotated[
    bool, typer.Option(help="Compare the archives with the official MD5 checksums.")
]
_AllowPartial = Annotated[
    bool, typer.Option("--allow-partial", help="Accept archives with fewer images or classes.")
]

_UNITS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "ki": 2**10, "mi": 2**20, "gi": 2**30}
_SHARD = "256MiB"


@prepare_app.command()
def digits(
    out: _Out,
    format_: _Format = "folder",
    shard_bytes: _ShardBytes = _SHARD,
    images_per_shard: _ImagesPerShard = None,
    seed: _Seed = 0,
    workers: _Workers = None,
) -> None:
    """Handwritten digits, which come with scikit-learn.

    Nothing is downloaded. 1,797 scans of 32 x 32 pixels: 1,437 for training, 360 for evaluation.
    """

    def work(report: ProgressCallback) -> dict[str, int]:
        from ...pipeline import prepare_digits

        output = _output(format_, shard_bytes, images_per_shard, None, 90, seed, workers)
        return prepare_digits(out, output, report)

    _run(out, work)


@prepare_app.command()
def cifar10(
    out: _Out,
    archive: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="cifar-10-python.tar.gz from https://www.cs.toronto.edu/~kriz/cifar.html, or a "
            "tar archive of train/CLASS/IMAGE and test/CLASS/IMAGE in JPEG or PNG.",
        ),
    ] = None,
    encoding: Annotated[
        str,
        typer.Option(
            help="Format of the official images, which come as raw pixels: png is lossless, jpeg "
            "is smaller."
        ),
    ] = "png",
    format_: _Format = "folder",
    shard_bytes: _ShardBytes = _SHARD,
    images_per_shard: _ImagesPerShard = None,
    quality: _Quality = 90,
    seed: _Seed = 0,
    workers: _Workers = None,
    checksum: _Checksum = True,
    allow_partial: _AllowPartial = False,
) -> None:
    """CIFAR-10: 60,000 images of 32 x 32 pixels in 10 classes.

    50,000 for training; the 10,000 of the test set are written as val.
    """

    def work(report: ProgressCallback) -> dict[str, int]:
        from ...pipeline import prepare_cifar10

        return prepare_cifar10(
            out,
            archive,
            _output(format_, shard_bytes, images_per_shard, None, quality, seed, workers),
            encoding=encoding,
            checksum=checksum,
            allow_partial=allow_partial,
            report=report,
        )

    _run(out, work)


@prepare_app.command()
def imagenet(
    out: _Out,
    train_archive: Annotated[
        Path | None, typer.Option(metavar="FILE", help="ILSVRC2012_img_train.tar (138 GB).")
    ] = None,
    val_archive: Annotated[
        Path | None, typer.Option(metavar="FILE", help="ILSVRC2012_img_val.tar (6.3 GB).")
    ] = None,
    devkit: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="ILSVRC2012_devkit_t12.tar.gz, which holds the labels of validation images.",
        ),
    ] = None,
    val_labels: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="In place of --devkit: a text file with one synset (n01440764) per line, in the "
            "order of the validation images, or Kaggle's LOC_val_solution.csv.",
        ),
    ] = None,
    format_: _Format = "folder",
    shard_bytes: _ShardBytes = _SHARD,
    images_per_shard: _ImagesPerShard = None,
    resize: _Resize = None,
    quality: _Quality = 90,
    seed: _Seed = 0,
    workers: _Workers = None,
    checksum: _Checksum = True,
    allow_partial: _AllowPartial = False,
) -> None:
    """ImageNet (ILSVRC 2012) from the archives of image-net.org.

    1,281,167 images of 1,000 classes for training, 50,000 for evaluation. Download the archives
    from https://image-net.org/download-images.php, which requires an account. They need not be
    unpacked: images are copied straight out of them. Verifying checksums takes some minutes, once.

    \b
      largebatch data prepare imagenet --train-archive ILSVRC2012_img_train.tar
          --val-archive ILSVRC2012_img_val.tar
          --devkit ILSVRC2012_devkit_t12.tar.gz
          --format webdataset --out data/imagenet
    """

    def work(report: ProgressCallback) -> dict[str, int]:
        from ...pipeline import prepare_imagenet

        return prepare_imagenet(
            out,
            train_archive,
            val_archive,
            _output(format_, shard_bytes, images_per_shard, resize, quality, seed, workers),
            devkit=devkit,
            val_labels=val_labels,
            checksum=checksum,
            allow_partial=allow_partial,
            report=report,
        )

    _run(out, work)


@prepare_app.command()
def folder(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SRC",
            help="Folder with train/CLASS/IMAGE and val/CLASS/IMAGE, or one of them; with --split "
            "CLASS/IMAGE.",
        ),
    ],
    out: _Out,
    split: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE",
            help="Share of each class that becomes val, such as 0.1, drawn by --seed; the others "
            "are train. Images of their own size are hard links where the file system has them.",
        ),
    ] = None,
    format_: _Format = "folder",
    shard_bytes: _ShardBytes = _SHARD,
    images_per_shard: _ImagesPerShard = None,
    resize: _Resize = None,
    quality: _Quality = 90,
    seed: _Seed = 0,
    workers: _Workers = None,
) -> None:
    """Divide class folders into train and val, convert them into shards, or shrink their images.

    \b
      largebatch data prepare folder photos --split 0.1 --out data/images
    """

    def work(report: ProgressCallback) -> dict[str, int]:
        from ...pipeline import LeftOut, prepare_folder

        output = _output(format_, shard_bytes, images_per_shard, resize, quality, seed, workers)
        left_out = LeftOut()
        counts = prepare_folder(out, source, output, report, left_out, split=split)
        if line := left_out.line():
            typer.echo(f"largebatch: warning: {line}", err=True)
        return counts

    _run(out, work)


def _run(out: Path, work: Callable[[ProgressCallback], dict[str, int]]) -> None:
    from ..errors import exit_on_user_error
    from .data_progress import Bar

    with exit_on_user_error(), Bar() as bar:
        counts = work(bar)
    splits = ", ".join(f"{count:,} images in {split}" for split, count in counts.items())
    print(f"{out}: {splits}")


def _output(
    form: str,
    shard_bytes: str,
    images_per_shard: int | None,
    resize: int | None,
    quality: int,
    seed: int,
    workers: int | None,
) -> Output:
    from ...pipeline import Output
    from ..errors import RecipeError

    match = re.fullmatch(r"([\d_]+(?:\.\d+)?)\s*([kmg]i?|)b?", shard_bytes.strip().lower())
    if match is None:
        raise RecipeError(
            f"--shard-bytes: {shard_bytes!r} is not a size; valid: such as 256MiB or 1GB"
        )
    return Output(
        format=form,
        shard_bytes=int(float(match[1]) * _UNITS[match[2]]),
        images_per_shard=images_per_shard,
        resize=resize,
        quality=quality,
        seed=seed,
        workers=workers,
    )
