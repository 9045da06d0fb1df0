"""CUDA graphs without a GPU: operators are recorded once and replayed on the same tensors."""

import torch
from torch.utils._pytree import tree_leaves

from tests.host_reads import NoHostReads


class Recording(NoHostReads):
    """Record the operators that run inside, and run them again with :meth:`replay`.

    As in a CUDA graph, the replay runs no Python of the recorded code, reads and writes the
    tensors that the recording used, and leaves results in the very tensors that it returned; and
    a value that the host reads is an error in the recording.
    """

    def __init__(self):
        super().__init__()
        self._calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = super().__torch_dispatch__(function, types, args, kwargs)
        self._calls.append((function, args, kwargs or {}, result))
        return result

    @torch.no_grad()
    def replay(self):
        for function, args, kwargs, result in self._calls:
            given = {t.data_ptr() for t in tree_leaves((args, kwargs)) if torch.is_tensor(t)}
            again = function(*args, **kwargs)
            for old, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                # Views and tensors changed in place are what they were.
                if torch.is_tensor(old) and old.data_ptr() not in given and old.numel():
                    old.copy_(new)
