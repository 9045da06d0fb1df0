"""The names of decoding backends, of error policies and of verifications."""

import importlib.util

from ..errors import DataError

#: Backends that decode and transform images.
BACKENDS = ("dali-gpu", "nvimgcodec", "dali-cpu", "torchvision")

#: What to do about images that cannot be used.
ON_ERROR = ("stop", "skip")

#: What makes an image unusable: that it cannot be decoded, or any damage that can be found.
VERIFY = ("decode", "strict")


def check_options(on_error: str, verify: str) -> None:
    """Check that the options of reading are known, and that what they need is installed."""
    if on_error not in ON_ERROR:
        raise DataError(f"unknown on_error {on_error!r}; valid: {', '.join(ON_ERROR)}")
    if verify not in VERIFY:
        raise DataError(f"unknown verify {verify!r}; valid: {', '.join(VERIFY)}")
    if verify == "strict":
        require_simplejpeg("verify=strict")


def require_simplejpeg(what: str) -> None:
    """Check that the package is installed through which libjpeg's warnings are seen."""
    if importlib.util.find_spec("simplejpeg") is None:
        raise DataError(
            f"{what} needs simplejpeg, which is not installed: pip install 'largebatch[recipes]'"
        )
