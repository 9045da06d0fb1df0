"""The digits, written as files and read back."""

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

from largebatch.pipeline import ImageFolder


def test_every_digit_is_written_once_with_its_pixels(digits):
    original = load_digits()
    train, val = ImageFolder(digits, "train"), ImageFolder(digits, "val")
    assert (len(train), len(val)) == (1437, 360)
    assert train.classes == val.classes == tuple("0123456789")
    seen = set()
    for source in (train, val):
        for i in range(len(source)):
            path = source.name(i)
            number = int(path.rpartition("/")[2].removesuffix(".jpeg"))
            seen.add(number)
            assert original.target[number] == source.labels[i]
            if number % 50 == 0:
                image = Image.open(path)
                assert (image.format, image.size, image.mode) == ("JPEG", (32, 32), "L")
                small = np.asarray(image.resize((8, 8), Image.Resampling.BOX)) * (16 / 255)
                assert np.abs(small - original.images[number]).mean() < 1
    assert seen == set(range(1797))
    assert all(int(val.name(i)[-9:-5]) % 5 == 0 for i in range(360))
