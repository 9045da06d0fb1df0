"""What is wrong with the data, as opposed to the code."""


class DataError(Exception):
    """Data that cannot be used; the message names the file or folder and what would be valid."""
