"""A check that nothing waits for a value from the device."""

from torch.utils._python_dispatch import TorchDispatchMode


class NoHostReads(TorchDispatchMode):
    """Fail on operators that make the host wait for a value from the device; ``names`` has all."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        self.names.append(name)
        assert name not in ("_local_scalar_dense", "is_nonzero", "nonzero", "equal", "item"), name
        return function(*args, **(kwargs or {}))
