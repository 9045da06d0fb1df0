"""The command ``largebatch data prepare``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import RecipeError

#: The data sets, and the options that are not for all of them.
_OPTIONS = {
    "digits": "",
    "cifar10": "archive no_checksum allow_partial",
    "imagenet": "train_archive val_archive devkit val_labels resize no_checksum allow_partial",
    "folder": "source split resize",
}


def _known(what: str) -> str:
    if what not in _OPTIONS:
        raise RecipeError(f"unknown data set {what!r}; valid: {', '.join(_OPTIONS)}")
    return what


def data_prepare(
    context: typer.Context,
    what: Annotated[
        str,
        typer.Argument(
            metavar="WHAT",
            help="digits: 1,797 scans of 32 x 32 pixels, which come with scikit-learn; cifar10; "
            "imagenet: ILSVRC 2012; folder: images of your own.",
            callback=_known,
        ),
    ],
    source: Annotated[
        Path | None,
        typer.Argument(
            metavar="SRC",
            help="folder: with train/CLASS/IMAGE and val/CLASS/IMAGE, or one of them; with --split "
            "CLASS/IMAGE.",
        ),
    ] = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder to create.")] = ...,  # type: ignore[assignment]
    split: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE",
            help="folder: share of each class that becomes val, such as 0.1, drawn by --seed; the "
            "others are train. Images of their own size are hard links where the file system has "
            "them.",
        ),
    ] = None,
    archive: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="cifar10: cifar-10-python.tar.gz from https://www.cs.toronto.edu/~kriz/cifar.html,"
            " or a tar archive of train/CLASS/IMAGE and test/CLASS/IMAGE in JPEG or PNG.",
        ),
    ] = None,
    train_archive: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="imagenet: ILSVRC2012_img_train.tar (138 GB)."),
    ] = None,
    val_archive: Annotated[
        Path | None, typer.Option(metavar="FILE", help="imagenet: ILSVRC2012_img_val.tar (6.3 GB).")
    ] = None,
    devkit: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="imagenet: ILSVRC2012_devkit_t12.tar.gz, which holds the labels of validation "
            "images.",
        ),
    ] = None,
    val_labels: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="imagenet, in place of --devkit: a text file with one synset (n01440764) per "
            "line, in the order of the validation images, or Kaggle's LOC_val_solution.csv.",
        ),
    ] = None,
    format_: Annotated[
        str,
        typer.Option(
            "--format",
            metavar="FORMAT",
            help="folder, or webdataset: tar shards with an index of theirs and the .idx files of "
            "DALI.",
        ),
    ] = "folder",
    resize: Annotated[
        int | None,
        typer.Option(
            metavar="PIXELS",
            help="imagenet and folder: shrink images whose shorter side is longer than this, and "
            "encode them as JPEG of quality 90.",
        ),
    ] = None,
    images_per_shard: Annotated[
        int | None, typer.Option(metavar="N", help="Images per shard; default: about 256 MiB.")
    ] = None,
    seed: Annotated[
        int,
        typer.Option(
            help="Seed of --split, and of the order of training images in shards, which is random "
            "so that programs that read from front to back see all classes mixed."
        ),
    ] = 0,
    workers: Annotated[
        int | None, typer.Option(help="Number of threads; default: one per core.")
    ] = None,
    no_checksum: Annotated[
        bool,
        typer.Option("--no-checksum", help="Do not compare archives with the official MD5 sums."),
    ] = False,
    allow_partial: Annotated[
        bool, typer.Option("--allow-partial", help="Accept archives with fewer images or classes.")
    ] = False,
) -> None:
    """Write a data set as class folders or as shards.

    \b
      largebatch data prepare digits --out data/digits
      largebatch data prepare folder photos --split 0.1 --out data/images
      largebatch data prepare cifar10 --archive cifar-10-python.tar.gz
          --out data/cifar10
      largebatch data prepare imagenet --train-archive ILSVRC2012_img_train.tar
          --val-archive ILSVRC2012_img_val.tar
          --devkit ILSVRC2012_devkit_t12.tar.gz
          --format webdataset --out data/imagenet

    Folders are DIR/train/CLASS/ and DIR/val/CLASS/; shards lie in DIR/train and DIR/val, with an
    index. CIFAR-10's test set is written as val. ImageNet's archives are those of
    https://image-net.org/download-images.php, which requires an account; they need not be unpacked.

    If the command is killed, run it again: it continues where it stopped, and the result is the
    same bit for bit. A complete data set is left as it is. Images keep their bytes, unless --resize
    makes them smaller.
    """
    from ... import pipeline
    from .data_progress import Bar

    for name, value in context.params.items():
        users = [data_set for data_set, names in _OPTIONS.items() if name in names.split()]
        if value and users and what not in users:
            option = "SRC" if name == "source" else f"--{name.replace('_', '-')}"
            raise RecipeError(f"{option}: not for {what}; valid for {' and '.join(users)}")
    left_out = pipeline.LeftOut()
    with Bar() as bar:
        output = pipeline.Output(
            format=format_,
            images_per_shard=images_per_shard,
            resize=resize,
            seed=seed,
            workers=workers,
        )
        checks: dict[str, Any] = {"checksum": not no_checksum, "allow_partial": allow_partial}
        if what == "digits":
            counts = pipeline.prepare_digits(out, output, bar)
        elif what == "cifar10":
            counts = pipeline.prepare_cifar10(out, archive, output, report=bar, **checks)
        elif what == "imagenet":
            labels: dict[str, Any] = {"devkit": devkit, "val_labels": val_labels}
            counts = pipeline.prepare_imagenet(
                out, train_archive, val_archive, output, report=bar, **labels, **checks
            )
        elif source is None:
            raise RecipeError("SRC: missing; valid: a folder of your images")
        else:
            counts = pipeline.prepare_folder(out, source, output, bar, left_out, split=split)
    if line := left_out.line():
        typer.echo(f"largebatch: warning: {line}", err=True)
    print(f"{out}: {', '.join(f'{count:,} images in {name}' for name, count in counts.items())}")
