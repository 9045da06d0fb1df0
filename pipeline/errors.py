"""The exception for faults in the data, as opposed to faults in the code."""


class DataError(Exception):
    """Raised for data that cannot be used; the message names the file or folder and the fix."""
