"""The model of streams runs what CUDA may run, and gives memory out as torch's allocators do."""

import pytest
import torch

from tests.streams import Machine, Stream

SEEDS = range(40)


def schedules(program):
    """Return what a program reads on the device under each of many schedules."""
    read = []
    for seed in SEEDS:
        with Machine(seed) as machine:
            result = program(machine)
            machine.synchronize()
        read.append(result.raw.tolist())
    return read


def zeros():
    return torch.zeros(3).to("cuda:0")


@pytest.mark.parametrize(
    ("order", "values"), [(None, {0, 1, 2}), ("stream", {2}), ("event", {1, 2})]
)
def test_streams_run_in_any_order_that_events_allow(order, values):
    """An event is the point that its stream had reached when it was recorded."""

    def program(machine):
        tensor, side = zeros(), torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            tensor.add_(1)
            event = side.record_event()
            tensor.add_(1)
        if order == "stream":
            torch.cuda.current_stream().wait_stream(side)
        if order == "event":
            torch.cuda.current_stream().wait_event(event)
        return tensor.clone()

    assert {value for value, *_ in schedules(program)} == values


@pytest.mark.parametrize("protection", [None, "record_stream", "kept", "other stream"])
def test_memory_freed_on_the_host_goes_to_the_same_stream_at_once(protection):
    """A tensor is read on a side stream, freed, and its memory allocated again."""

    def program(machine):
        tensor, side = zeros(), torch.cuda.Stream()
        read = torch.empty_like(tensor)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            read.copy_(tensor)
        if protection == "record_stream":
            tensor.record_stream(side)
        kept = tensor if protection == "kept" else None
        del tensor
        with torch.cuda.stream(Stream() if protection == "other stream" else None):
            torch.ones(3).to("cuda:0")
        torch.cuda.current_stream().wait_stream(side)
        del kept
        return read

    read = schedules(program)
    wrong = [values for values in read if values != [0, 0, 0]]
    assert bool(wrong) == (protection is None)
    assert len(wrong) < len(read)


@pytest.mark.parametrize("recorded", [True, False])
def test_pinned_memory_is_given_out_when_its_copies_are_done(recorded):
    def program(machine):
        copies = []
        for value in range(3):
            pinned = torch.full((3,), float(value)).pin_memory()
            copies.append(pinned.to("cuda:0", non_blocking=True))
            if not recorded:
                machine.pinned[pinned.data_ptr()].marks.clear()
            del pinned
        return copies[0]

    assert all(values == [0, 0, 0] for values in schedules(program)) == recorded


def test_new_memory_holds_nan_and_what_waits_for_ever_or_on_the_host_is_refused():
    read = schedules(lambda machine: torch.empty(3, dtype=torch.bfloat16, device="cuda:0").clone())
    assert all(value != value for values in read for value in values)
    with Machine(0) as machine:
        tensor = zeros()
        for read in (lambda: tensor[:1].item(), lambda: torch.empty(3).copy_(tensor)):
            with pytest.raises(AssertionError, match="the host reads the device"):
                read()
        machine.enqueue(lambda: None, lambda: False)
        with pytest.raises(AssertionError, match="streams wait for ever"):
            machine.synchronize()
